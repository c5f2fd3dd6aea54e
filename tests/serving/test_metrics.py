"""`/metrics`: true numbers, and a dashboard that asks for what is there."""

import functools
import json
import re
from pathlib import Path

import httpx
import promql_parser
import pytest
from captures import HandCapture
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until, wait_until_at_rest

from layertap import HiddenStatesError, load_hidden_states
from layertap.engines.transformers.row_tap import _Group
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def fresh(make_llm, tmp_path_factory):
    llm = make_llm(tmp_path_factory.mktemp("metrics"), max_storage_bytes=50_000_000)
    with run_background(llm.front, ServerSettings(served_model_names=("tiny",), allow_delete=True)) as running:
        yield running


def scrape(server):
    text = httpx.get(f"{server.url}/metrics").text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_was_done_is_what_is_counted(fresh):
    before = scrape(fresh)
    body = {
        "prompt": ["one", "another"],
        "max_tokens": 4,
        "ignore_eos": True,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    answer = httpx.post(f"{fresh.url}/v1/completions", json=body, timeout=60).json()
    files = [load_hidden_states(c["kv_transfer_params"]["hidden_states_path"]) for c in answer["choices"]]
    httpx.post(f"{fresh.url}/v1/completions", json={"prompt": ""})
    hand = HandCapture(fresh.state.front, "counted")
    fresh.state.book.follow([hand.capture])
    hand.fail("no reason in particular")
    assert httpx.delete(f"{fresh.url}/v1/hidden_states/{answer['id']}").status_code == 204
    wait_until_at_rest(fresh)
    count = "layertap_publish_seconds_count"
    wait_until(lambda: scrape(fresh)[(count,)] == before[(count,)] + 2, "two files were published")
    after = scrape(fresh)

    def grown(*key):
        return after[key] - before.get(key, 0)

    assert grown("layertap_requests_total", "/v1/completions", "200") == 1
    assert grown("layertap_requests_total", "/v1/completions", "400") == 1
    assert grown("layertap_tokens_total", "prompt") == answer["usage"]["prompt_tokens"]
    assert grown("layertap_tokens_total", "generated") == 8
    rows = sum(len(states["token_ids"]) for states in files)
    assert grown("layertap_rows_total") == rows
    assert grown("layertap_bytes_total") == rows * (3 * 64 * 4 + 8)
    assert grown("layertap_files", "ready") == 2
    assert grown("layertap_files", "failed") == 1
    assert grown("layertap_failures_total", "engine") == 1
    assert grown("layertap_publish_seconds_count") == 2
    assert grown("layertap_reaped_files_total", "deleted") == 1
    assert after[("layertap_store_quota_bytes",)] == 50_000_000
    assert 0 < after[("layertap_store_used_bytes",)] < 50_000
    assert after[("layertap_bytes_in_flight",)] == after[("layertap_store_reserved_bytes",)] == 0


def test_spot_checks_are_counted_and_a_failed_one_says_why(fresh, monkeypatch):
    checks = fresh.state.front.engine.spot_checks
    monkeypatch.setattr(checks["generate"], "one_in", 1)
    monkeypatch.setattr(checks["generate"], "_until_next", -1)
    before = scrape(fresh)
    body = {"prompt": "right and wrong", "max_tokens": 4, "ignore_eos": True}
    ask = functools.partial(httpx.post, f"{fresh.url}/v1/completions", json=body, timeout=60)
    load_hidden_states(ask().json()["choices"][0]["kv_transfer_params"]["hidden_states_path"])
    real = _Group._rows
    monkeypatch.setattr(_Group, "_rows", lambda self, hidden: real(self, hidden.roll(1, dims=0)))
    wrong = ask().json()["choices"][0]["kv_transfer_params"]["hidden_states_path"]
    with pytest.raises(HiddenStatesError, match="the spot check computed the sequence again"):
        load_hidden_states(wrong)
    after = scrape(fresh)
    for outcome in ("passed", "failed"):
        key = ("layertap_spot_checks_total", *sorted(("generate", outcome)))
        assert after[key] - before[key] == 1
    assert after[("layertap_spot_checks_total", "extract", "failed")] == 0
    assert after[("layertap_spot_check_worst_error", "generate")] > 0.1


def test_a_path_of_a_clients_choice_makes_no_new_series(fresh):
    before = len(scrape(fresh))
    with httpx.Client(base_url=fresh.url) as http:
        for i in range(20):
            http.get(f"/no/such/{i}")
            http.get(f"/v1/hidden_states/x{i}")
    # at most the ones for (other, 404) and (hidden_states, 404)
    assert len(scrape(fresh)) - before <= 40


def test_each_query_of_the_dashboard_parses_and_asks_for_metrics_and_labels_that_exist(fresh):
    httpx.get(f"{fresh.url}/v1/models")
    families = list(text_string_to_metric_families(httpx.get(f"{fresh.url}/metrics").text))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = set()
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*")
            promql_parser.parse(query)
            names = set(re.findall(r"\blayertap_\w+", query))
            assert names
            assert names <= labels.keys(), names - labels.keys()
            asked |= names
            for name in names:
                for group in re.findall(r"by \(([^)]*)\)", query):
                    assert {label.strip() for label in group.split(",")} <= labels[name], (panel["title"], name)
    exposed = {
        re.sub(r"_(bucket|count|sum|created|total)$", "", name) for name in labels if name.startswith("layertap_")
    }
    assert exposed == {re.sub(r"_(bucket|total)$", "", name) for name in asked}
