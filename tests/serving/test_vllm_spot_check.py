"""The spot check of vLLM's server, against the embedded server: it speaks the same language, and says what vLLM's would."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from layertap import HiddenStatesError, load_hidden_states
from layertap.errors import OptionError
from layertap.files.format import row_digests
from layertap.files.publish import PendingFile
from layertap.files.read import read_file
from layertap.serving.launch import ServeOptions
from layertap.serving.vllm_command import vllm_command
from layertap.serving.vllm_middleware import CONFIG_ENV
from layertap.serving.vllm_spot_check import SpotChecks, can_be_computed_again, changes_weights

BODY = {"model": "tiny", "max_tokens": 6, "ignore_eos": True, "kv_transfer_params": {"include_output_tokens": True}}


class Bench:
    """Asks a server, checks its answers, and counts by itself what was asked."""

    def __init__(self, url, one_in=1):
        self.url = url
        self.registry = CollectorRegistry()
        self.checks = SpotChecks(one_in, self.registry)
        self.asked = []
        self.own = []

    def complete(self, prompt, **capture):
        body = BODY | {"prompt": prompt, "kv_transfer_params": BODY["kv_transfer_params"] | capture}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()
        handle = answer["choices"][0]["kv_transfer_params"]
        read_file(handle["hidden_states_path"])
        return handle

    async def post(self, body):
        self.asked.append(body)
        known = {key: value for key, value in body.items() if key != "cache_salt"}  # it has no cache
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{self.url}/v1/completions", json=known, timeout=60)
        if answer.status_code == 200:
            self.own.append(Path(answer.json()["choices"][0]["kv_transfer_params"]["hidden_states_path"]))
        return answer.status_code, answer.content

    def run(self, handle, body=BODY, unchanged=lambda: True):
        return asyncio.run(self.checks.run(handle, body, self.post, unchanged))

    def count(self, outcome):
        return self.registry.get_sample_value("layertap_spot_checks_total", {"kind": "generate", "outcome": outcome})


@pytest.fixture
def bench(server):
    return Bench(server.url)


def put(path, loaded, rows):
    """Another file in the place of one, with checksums that are right."""
    path = Path(path)
    pending = PendingFile(path, loaded.info, len(rows), overwrite=True)
    pending.write(0, 0, rows)
    pending.publish(
        first_row=0,
        token_ids=loaded.token_ids,
        digests=row_digests(rows.reshape(len(rows), -1), loaded.token_ids),
        first_position=loaded.info.first_position,
        num_tokens=loaded.info.num_tokens,
        facts=loaded.info.facts,
    )


@pytest.mark.parametrize("capture", [{}, {"layers": [3, 1]}, {"save_dtype": "bfloat16"}, {"save_dtype": "fp8_e4m3"}])
def test_right_rows_pass_and_the_checks_own_file_goes(bench, capture):
    handle = bench.complete("what is right", **capture)
    before = Path(handle["hidden_states_path"]).read_bytes()
    assert bench.run(handle) == "passed"
    assert (bench.count("passed"), bench.count("failed"), bench.count("skipped")) == (1, 0, 0)
    assert Path(handle["hidden_states_path"]).read_bytes() == before
    assert len(bench.own) == 1
    assert not bench.own[0].exists()
    assert 0 <= bench.registry.get_sample_value("layertap_spot_check_worst_error", {"kind": "generate"}) < 1e-2


def test_of_a_long_sequence_only_a_stretch_is_asked_for(bench):
    bench.checks = SpotChecks(1, bench.registry, most_rows=32)
    handle = bench.complete([9 + i % 50 for i in range(90)])
    assert bench.run(handle) == "passed"
    (asked,) = bench.asked
    first, end = asked["kv_transfer_params"]["positions"]
    assert end - first == 32
    assert len(asked["prompt"]) == end <= 95
    assert asked["max_tokens"] == 1


def test_rows_of_another_prompt_end_in_quarantine_and_its_reader_is_told(bench):
    mine, other = bench.complete([9, 10, 11, 12, 13]), bench.complete([40, 41, 42, 43, 44])
    path = Path(mine["hidden_states_path"])
    put(path, read_file(path), read_file(other["hidden_states_path"]).rows)
    load_hidden_states(path)  # no checksum says it
    assert bench.run(mine) == "failed"
    assert (bench.count("failed"), bench.count("passed")) == (1, 0)
    with pytest.raises(HiddenStatesError, match=r"the spot check computed the sequence again.*kept as .*\.quarantined"):
        load_hidden_states(path)
    told = httpx.get(f"{bench.url}/v1/hidden_states/{mine['hidden_states_id']}")
    assert (told.status_code, "the spot check computed" in told.text) == (410, True)
    assert len(list(path.parent.glob(f"{path.name}.*.quarantined"))) == 1
    assert not bench.own[0].exists()
    assert bench.registry.get_sample_value("layertap_spot_check_worst_error", {"kind": "generate"}) > 0.1


def test_a_layer_off_by_one_in_a_tenth_of_the_rows_fails(bench):
    handle, shifted = (bench.complete([9 + i for i in range(30)], layers=layers) for layers in ([1, 2], [2, 3]))
    path = Path(handle["hidden_states_path"])
    loaded = read_file(path)
    rows = loaded.rows.copy()
    rows[10:13] = read_file(shifted["hidden_states_path"]).rows[10:13]
    put(path, loaded, rows)
    assert bench.run(handle) == "failed"
    assert not path.exists()


def test_what_cant_be_checked_is_counted_and_left_alone(bench):
    late = bench.complete("only the last", positions="last")
    assert bench.run(late) == "skipped"
    gone = bench.complete("gone")
    Path(gone["hidden_states_path"]).unlink()
    assert bench.run(gone) == "skipped"
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    assert bench.run(bench.complete("with an image"), BODY | image) == "skipped"
    assert bench.asked == []
    assert bench.run(bench.complete("x"), BODY | {"model": "nobody's"}) == "skipped"
    one = bench.complete("replaced")
    path = Path(one["hidden_states_path"])
    loaded = read_file(path)
    facts = {**loaded.info.facts, "request_id": "another"}
    put(path, replace(loaded, info=replace(loaded.info, facts=facts)), loaded.rows)
    assert bench.run(one) == "skipped"
    assert load_hidden_states(path)["token_ids"].tolist() == loaded.token_ids.tolist()
    assert (bench.count("skipped"), bench.count("passed"), bench.count("failed")) == (5, 0, 0)


def test_new_weights_in_between_quarantine_nothing(bench):
    mine, other = bench.complete([9, 10, 11]), bench.complete([40, 41, 42])
    path = Path(mine["hidden_states_path"])
    put(path, read_file(path), read_file(other["hidden_states_path"]).rows)
    assert bench.run(mine, unchanged=lambda: False) == "skipped"
    assert path.exists()
    assert not bench.own[0].exists()
    assert changes_weights("/update_weights")
    assert changes_weights("/v1/load_lora_adapter")
    assert not changes_weights("/tokenize")


def test_one_check_runs_at_a_time_and_one_request_in_n_is_due(server):
    bench = Bench(server.url)
    handle = bench.complete("one at a time")

    async def two():
        assert bench.checks.due()
        bench.checks.start(handle, BODY, bench.post, lambda: True)
        assert not bench.checks.due()
        await bench.checks._running
        assert bench.checks.due()

    asyncio.run(two())
    assert (bench.count("passed"), bench.count("skipped")) == (1, 1)
    rare = SpotChecks(10, CollectorRegistry())
    assert sum(rare.due() for _ in range(100)) == 10


def test_only_rows_that_follow_from_token_ids_are_computed_again():
    assert can_be_computed_again({"prompt": ["a", "b"]})
    assert can_be_computed_again({"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]})
    assert can_be_computed_again({"messages": [{"content": [{"type": "text", "text": "x"}]}]})
    assert not can_be_computed_again({"prompt_embeds": "abc"})
    assert not can_be_computed_again({"messages": [{"content": [{"type": "input_audio"}]}]})


def test_the_command_says_how_often_and_refuses_what_cant_be_checked():
    _, told = vllm_command(ServeOptions(model="m", engine_options={"spot_check": 7}))
    assert '"spot_check": 7' in told[CONFIG_ENV]
    assert '"spot_check": 0' in vllm_command(ServeOptions(model="m"))[1][CONFIG_ENV]
    for one_in, store, words in (
        (-1, {}, "at least 0"),
        (5, {"handover": "memory://bucket/x"}, "object storage"),
        (5, {"use_synchronization_lock": False}, "locks"),
    ):
        with pytest.raises(OptionError, match=words):
            vllm_command(ServeOptions(model="m", engine_options={"spot_check": one_in}, store=store))
