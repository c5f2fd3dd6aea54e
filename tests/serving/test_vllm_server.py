"""`layertap serve --engine vllm`: stock vLLM with our middleware says and saves the same as the embedded engine."""

import asyncio
import importlib.util
import json
import secrets
import subprocess
import sys
from pathlib import Path

import httpx
import mixed_load
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM
from vllm_process import LAYERTAP, SMALL, vllm_serving
from waiting import wait_until

from layertap import load_hidden_states
from layertap.client import HiddenStatesClient
from layertap.errors import MissingError, OptionError
from layertap.serving.launch import ServeOptions
from layertap.serving.settings import ServerSettings
from layertap.serving.sse import EventSplitter
from layertap.serving.vllm_command import vllm_command
from layertap.serving.vllm_middleware import CONFIG_ENV
from layertap.testing import oracle

EXAMPLE = Path(__file__).parents[2] / "examples" / "extract_hidden_states_online.py"
LAYERS = (1, 2, 4)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed here")


DRAFT = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}}
SPECULATIVE = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": DRAFT}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Address, storage and reference model of a running server: vLLM's documented flags, dashes or underscores, three API keys."""
    import checkpoints

    folder = tmp_path_factory.mktemp("vllm")
    checkpoint = checkpoints.save("llama", folder)
    store = folder / "store"
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(store)}}  # fmt: skip
    with vllm_serving(
        LAYERTAP, str(checkpoint), "--engine", "vllm", "--speculative_config", json.dumps(SPECULATIVE),
        "--kv_transfer_config", json.dumps(transfer), "--host", "127.0.0.1", "--api_key", "alpha", "beta", "EMPTY",
        "--served_model_name", "tiny", "alias", *SMALL, "--handover", "http", "--allow-delete",
        "--max-storage-bytes", "20000000", "--spot-check", "1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ) as (url, _):  # fmt: skip
        yield url, store, AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()


@pytest.fixture(scope="module")
def alpha(vllm):
    with openai.OpenAI(base_url=f"{vllm[0]}/v1", api_key="alpha", max_retries=0) as made:
        yield made


def check(vllm, handle, tokens):
    states = load_hidden_states(handle["hidden_states_path"], timeout=60)
    assert states["token_ids"].tolist() == list(tokens)
    expected = oracle.hidden_states(vllm[2], list(tokens), list(LAYERS))
    assert float(((states["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-4


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_each_prompt_and_choice_has_its_rows(vllm, alpha):
    extra = {"return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}
    answer = alpha.completions.create(model="tiny", prompt=["hello", "and two"], n=2, max_tokens=5, extra_body=extra)
    names = [choice.kv_transfer_params["hidden_states_id"] for choice in answer.choices]
    assert names == [answer.id + suffix for suffix in ("", "-0-1", "-1-0", "-1-1")]
    assert answer.kv_transfer_params == answer.choices[0].kv_transfer_params
    for choice in answer.choices:
        check(vllm, choice.kv_transfer_params, (list(choice.prompt_token_ids) + list(choice.token_ids))[:-1])


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_stream_has_each_choices_handle_on_its_last_chunk(vllm, alpha):
    extra = {"return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}
    chunks = list(
        alpha.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=4, stream=True, extra_body=extra
        )
    )
    prompt = next(chunk.prompt_token_ids for chunk in chunks if getattr(chunk, "prompt_token_ids", None))
    for index in range(2):
        mine = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        tokens = [token for chunk in mine for token in getattr(chunk.choices[0], "token_ids", None) or []]
        assert mine[-1].choices[0].finish_reason is not None
        check(vllm, mine[-1].choices[0].kv_transfer_params, (prompt + tokens)[:-1])
        assert all("kv_transfer_params" not in chunk.choices[0].model_extra for chunk in mine[:-1])


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": [1]}, "'layers'"),
        ({"layers": [3]}, "[3]"),
        ({"positions": [0, 99]}, "outside"),
        ({"layertap_id": "x"}, "unknown"),
        ({"tag": "../x"}, "tag"),
        ({"include_output_tokens": 1}, "true or false"),
    ],
)
def test_bad_options_are_a_400_and_free_their_tag(vllm, alpha, options, words):
    tag = {"tag": f"t-{secrets.token_hex(4)}"} | options
    with pytest.raises(openai.BadRequestError) as caught:
        alpha.completions.create(model="tiny", prompt="x", max_tokens=2, extra_body={"kv_transfer_params": tag})
    assert words in str(caught.value)
    if tag["tag"].startswith("t-"):
        alpha.completions.create(
            model="tiny", prompt="x", max_tokens=1, extra_body={"kv_transfer_params": {"tag": tag["tag"]}}
        )


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_stop_strings_files_over_http_tags_and_keys(vllm, alpha):
    url = vllm[0]
    body = {"model": "tiny", "prompt": "stop here", "max_tokens": 100, "stop": ["e", "a", "o"], "ignore_eos": True,
            "return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True, "tag": "mine"}}  # fmt: skip
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    with (
        HiddenStatesClient(url, api_key="alpha", local=False) as mine,
        HiddenStatesClient(url, api_key="beta", local=False) as other,
    ):
        (choice,) = mine.complete(**body)["choices"]
        loaded = mine.fetch_raw(choice)
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        assert loaded.token_ids.tolist() == tokens[:-1]
        assert [handle["state"] for handle in mine.find("mine")] == ["ready"]
        with pytest.raises(MissingError):
            other.fetch(choice)
        other.complete(**body)
        mine.delete(choice)
        with pytest.raises(MissingError):
            mine.fetch(choice)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_client_that_leaves_gets_no_file_but_a_reason(vllm):
    url = vllm[0]
    body = {"model": "tiny", "prompt": "leave", "max_tokens": 240, "ignore_eos": True, "stream": True,
            "kv_transfer_params": {"include_output_tokens": True, "tag": "left"}}  # fmt: skip
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers={"authorization": "Bearer alpha"}, timeout=60
    ) as answer:
        next(answer.iter_lines())
    with HiddenStatesClient(url, api_key="alpha", local=False) as mine:
        name = mine.find("left")[0]["hidden_states_id"]
        answer = httpx.get(
            f"{url}/v1/hidden_states/{name}", params={"wait": 30}, headers={"authorization": "Bearer alpha"}, timeout=60
        )
    assert (answer.status_code, "aborted" in answer.text) == (410, True)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_60_mixed_requests_at_once_equal_the_oracle(vllm):
    outcomes = asyncio.run(mixed_load.run_all(vllm[0], 60, api_key="alpha", most=200, seeded=False))
    assert len(outcomes) == 60
    for kind, answers in outcomes:
        assert answers or kind in mixed_load.GIVEN_UP
        for handle, tokens in answers:
            check(vllm, handle, tokens[:-1])
    assert sum(len(answers) for _, answers in outcomes) > 40


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_client_fetches_prompts_choices_and_streams_as_from_the_embedded_engine(vllm, alpha):
    body = {"max_tokens": 30, "stop": ["e", "a"], "ignore_eos": True, "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": True}}  # fmt: skip
    with HiddenStatesClient(vllm[0], api_key="alpha", local=False) as mine:
        answer = mine.complete(["one", "and two"], n=2, model="tiny", **body)
        assert len(answer["choices"]) == 4
        for choice in answer["choices"]:
            tokens = choice["prompt_token_ids"] + choice["token_ids"]
            assert mine.fetch(choice)["token_ids"].tolist() == tokens[:-1]
        extra = {key: body[key] for key in ("ignore_eos", "return_token_ids", "kv_transfer_params")}
        stream = alpha.completions.create(model="tiny", prompt="a stream", max_tokens=5, stream=True, extra_body=extra)
        choices = [choice for chunk in stream for choice in chunk.choices]
        tokens = [token for choice in choices for token in choice.token_ids or []]
        assert mine.fetch(choices[-1])["token_ids"].tolist()[-4:] == tokens[:-1]


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_what_cant_fit_into_the_store_is_507_before_it_is_generated(vllm):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "much"}], "n": 128, "max_tokens": 250,
            "kv_transfer_params": {"include_output_tokens": True}}  # fmt: skip
    with httpx.Client(base_url=vllm[0], headers={"authorization": "Bearer alpha"}, timeout=60) as http:
        for _ in range(2):
            answer = http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "store_full"), answer.text
            assert "max_storage_bytes allows 20000000" in answer.json()["error"]["message"]
        fits = http.post("/v1/chat/completions", json=body | {"n": 1, "max_tokens": 2})
        assert fits.status_code == 200


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_documented_online_example_and_curl(vllm, tmp_path):
    url, store, _ = vllm
    shown = subprocess.run(
        [sys.executable, str(EXAMPLE), f"{url}/v1", "tiny"], capture_output=True, text=True, timeout=300, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("hidden_states:") == 3
    assert "3, 64]" in shown.stdout
    key = ["-H", "authorization: Bearer EMPTY"]
    body = json.dumps({"model": "alias", "prompt": [9, 10, 11], "max_tokens": 1})
    command = ["curl", "-sf", f"{url}/v1/completions", *key, "-H", "content-type: application/json", "-d", body]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    target = tmp_path / "states.safetensors"
    link = url + answer["kv_transfer_params"]["hidden_states_url"]
    subprocess.run(["curl", "-sf", *key, "-o", target, f"{link}?wait=30"], check=True, timeout=60)
    check(vllm, {"hidden_states_path": str(target)}, [9, 10, 11])
    partial = subprocess.run(["curl", "-sf", *key, "-r", "0-99", link], capture_output=True, check=True, timeout=60)
    assert partial.stdout == target.read_bytes()[:100]


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_route_but_health_wants_a_key_and_none_lets_a_client_choose_its_place(vllm, tmp_path):
    url, store, _ = vllm
    for method, path in (("GET", "/metrics"), ("POST", "/tokenize"), ("GET", "/version"), ("POST", "/v1/responses"),
                         ("POST", "/invocations"), ("GET", "/docs"), ("GET", "/v1/models")):  # fmt: skip
        assert httpx.request(method, url + path).status_code == 401, path
    assert httpx.get(f"{url}/health").status_code == 200
    huge = [
        "curl",
        "-s",
        "-m",
        "60",
        "-w",
        "%{http_code}",
        "-o",
        tmp_path / "answer",
        "-d",
        "x",
        "-H",
        f"content-length: {1 << 40}",
    ]
    huge += ["-H", "authorization: Bearer alpha", f"{url}/v1/messages"]
    assert subprocess.run(huge, capture_output=True, timeout=90, check=False).stdout == b"413"
    target = tmp_path / "mine.safetensors"
    secret = {"hidden_states_path": str(target), "layertap_id": "somebody", "layertap_front": "x"}
    asked = {"model": "tiny", "max_tokens": 1, "kv_transfer_params": secret}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    known = {path.name for path in store.iterdir()}
    key = {"authorization": "Bearer alpha"}
    for path, more in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat)):
        assert httpx.post(url + path, json=asked | more, headers=key, timeout=60).status_code == 400
    taken = []
    for path, more in (
        ("/invocations", {"prompt": "x"}),
        ("/v1/messages", chat),
        ("/v1/chat/completions/batch", {"messages": [chat["messages"]]}),
        ("/inference/v1/generate", {"token_ids": [9, 10], "sampling_params": {"max_tokens": 1}}),
    ):
        taken.append(httpx.post(url + path, json=asked | more, headers=key, timeout=60).status_code == 200)
        assert not target.exists(), path
    assert any(taken)
    assert not [path.name for path in store.iterdir() if path.name not in known and "somebody" in path.name]


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_spot_checks_pass_are_counted_and_leave_nothing_behind(vllm, alpha):
    url, store, _ = vllm
    key = {"authorization": "Bearer beta"}

    def counts():
        answer = httpx.get(f"{url}/metrics", headers=key, timeout=60)
        samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
        return {one.labels["outcome"]: one.value for one in samples if one.name == "layertap_spot_checks_total"}

    before = counts()
    asked = {"include_output_tokens": True}
    for count in range(1, 100):
        handle = alpha.completions.create(
            model="tiny", prompt=f"checked {count}", max_tokens=3, extra_body={"kv_transfer_params": asked}
        ).kv_transfer_params
        load_hidden_states(handle["hidden_states_path"], timeout=60)
        now = counts()
        if now["passed"] >= before["passed"] + 3:
            break
    assert now["passed"] >= before["passed"] + 3
    assert now["failed"] == 0
    assert sum(now.values()) <= sum(before.values()) + count + 1  # a check isn't checked
    wait_until(
        lambda: not [path for path in store.iterdir() if "spot-check" in path.name], "the checks' own files stay"
    )
    assert not list(store.glob("*.quarantined"))


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_structured_answers_and_tool_calls_have_their_rows(vllm, alpha):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60,
           "extra_body": {"return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = alpha.chat.completions.create(**ask, response_format=wanted)
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
    check(vllm, answer.kv_transfer_params, (answer.prompt_token_ids + answer.choices[0].token_ids)[:-1])
    tools = [{"type": "function", "function": {"name": "decide", "parameters": SCHEMA, "strict": True}}]
    chosen = {"type": "function", "function": {"name": "decide"}}
    answer = alpha.chat.completions.create(**ask | {"max_tokens": 120}, tools=tools, tool_choice=chosen)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("decide", {"ok"})
    check(vllm, answer.kv_transfer_params, (answer.prompt_token_ids + answer.choices[0].token_ids)[:-1])


def test_the_command_is_vllms_with_our_options_in_their_place():
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
    options = ServeOptions(
        model="m",
        port=9,
        speculative_config={"method": "extract_hidden_states", "draft_model_config": draft},
        kv_transfer_config={"kv_connector": "ExampleHiddenStatesConnector"},
        store={"shared_storage_path": "/x"},
        engine_options={"dtype": "float32", "trust_remote_code": True},
        settings=ServerSettings(served_model_names=("a", "b"), api_keys=("secret",)),
    )  # fmt: skip
    command, environment = vllm_command(options, ["--tensor-parallel-size", "2"])
    assert "secret" not in str(command)  # which every user of the machine may read
    assert json.loads(environment[CONFIG_ENV])["api_keys"] == ["secret"]
    text = " ".join(command)
    assert " serve m --host 127.0.0.1 --port 9 " in text
    assert '"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer"' in text
    assert '"layers": [1, 2]' in text
    assert "--speculative-config" not in text
    assert "--served-model-name a b" in text
    assert text.endswith("--shutdown-timeout 3600 --tensor-parallel-size 2")
    assert vllm_command(options, ["--shutdown_timeout=5"])[0][-2:] == ["20", "--shutdown_timeout=5"]
    assert "allow_custom_save_path" not in text
    told = environment[CONFIG_ENV]
    assert '"allow_custom_save_path"' not in told
    for change, words in (
        ({"engine_options": {"device": "cuda"}}, "device"),
        ({"store": {"handover": "nosuch://b"}}, "nosuch"),
        ({"weights_version": "1"}, "weights_version"),
        ({"settings": ServerSettings(allow_weight_updates=("/x",))}, "allow_weight_updates"),
        ({"settings": ServerSettings(max_running=5)}, "max_running"),
    ):
        with pytest.raises(OptionError, match=words):
            vllm_command(ServeOptions(model="m", **change))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_wherever_a_stream_is_cut(size):
    raw = b'data: {"a":1}\n\ndata: {"b":"x"}\n\ndata: [DONE]\n\n'
    splitter = EventSplitter()
    events = [event for i in range(0, len(raw), size) for event in splitter.feed(raw[i : i + size])]
    events += splitter.feed(b"rest", done=True)
    assert events == [b'data: {"a":1}\n\n', b'data: {"b":"x"}\n\n', b"data: [DONE]\n\n", b"rest"]
