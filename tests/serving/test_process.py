"""The command itself, as a process: vLLM's documented flags, curl, the documented example, SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serve_process import serving
from typer.testing import CliRunner

from layertap import load_hidden_states
from layertap.cli.app import make_app

ROOT = Path(__file__).parents[2]
DOCUMENTED = {
    "speculative_config": {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}},
    },
    "kv_transfer_config": {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"},
}


@pytest.fixture(scope="module")
def documented(checkpoint, tmp_path_factory):
    """vLLM's documented command, dashes exchanged for underscores as it is written there."""
    folder = tmp_path_factory.mktemp("documented") / "hidden_states"
    config = {**DOCUMENTED["kv_transfer_config"], "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    with serving(
        str(checkpoint),
        "--speculative_config",
        json.dumps(DOCUMENTED["speculative_config"]),
        "--kv_transfer_config",
        json.dumps(config),
        "--no-enable-chunked-prefill",
        "--host",
        "127.0.0.1",
        "--max_model_len",
        "250",
        "--dtype",
        "float32",
    ) as (url, process, log):
        yield url, folder, log


def test_the_documented_command_and_the_online_example(documented, checkpoint, states_of):
    url, folder, _ = documented
    example = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "extract_hidden_states_online.py"), f"{url}/v1", str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert example.returncode == 0, example.stderr
    assert example.stdout.count("hidden_states:") == 3
    assert "4, 64]" in example.stdout
    left = [name for name in os.listdir(folder) if not name.startswith(".")]
    assert left == [] or left == ["tags"]


def test_curl_gets_an_answer_and_its_file(documented, tmp_path, states_of, checkpoint):
    url, _, _ = documented
    body = {"model": str(checkpoint), "prompt": [9, 10, 11], "max_tokens": 1}
    command = ["curl", "-sf", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", json.dumps(body)]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    target = tmp_path / "states.safetensors"
    name = answer["kv_transfer_params"]["hidden_states_id"]
    subprocess.run(["curl", "-sf", "-o", target, f"{url}/v1/hidden_states/{name}?wait=30"], check=True, timeout=60)
    states = load_hidden_states(target)
    expected = states_of((9, 10, 11), (1, 2, 3, 4))
    assert float((states["hidden_states"] - expected).abs().max()) < 1e-4


def test_sigterm_finishes_what_runs_and_publishes_it(checkpoint, tmp_path):
    config = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with serving(
        str(checkpoint), "--kv-transfer-config", json.dumps(config), "--speculative-config", '{"method": "extract_hidden_states"}',
        "--layers", "1,3", "--served-model-name", "tiny", "alias", "--max-model-len", "200", "--dtype", "float32",
        "--api_key", "first", "second",
    ) as (url, process, log):  # fmt: skip
        body = {
            "model": "alias",
            "prompt": "a long answer",
            "max_tokens": 180,
            "ignore_eos": True,
            "stream": True,
            "kv_transfer_params": {"include_output_tokens": True},
        }
        last = None
        key = {"authorization": "Bearer second"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=120) as answer:
            for number, line in enumerate(answer.iter_lines()):
                if number == 4:
                    process.send_signal(signal.SIGTERM)
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
        handle = last["choices"][0]["kv_transfer_params"]
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(120) == 0
    states = load_hidden_states(handle["hidden_states_path"])
    assert states["hidden_states"].shape[1:] == (2, 64)
    assert len(states["token_ids"]) > 180
    text = "".join(log)
    assert "kv_role was not given: taking 'kv_producer'" in text
    assert "ttl_seconds was not given" in text
    assert "stopped; everything that was running was finished" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nonsense"], "no such option: --nonsense"),
        (["--kv-transfer-config", "{"], "expected a JSON object"),
        (["--kv-transfer-config", '{"kv_connector": "Other"}'], "HiddenStatesConnector"),
        (["--speculative-config", '{"method": "eagle"}'], "speculative"),
        (["--layers", "1,99"], "99"),
        (["--ttl-seconds", "soon"], "seconds"),
        (["--api-key", ""], "api_key"),
        (["--handover", "carrier-pigeon"], "handover"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--host", "256.1.1.1"], "256.1.1.1"),
    ],
)
def test_wrong_options_are_said_and_nothing_is_served(checkpoint, arguments, words):
    result = CliRunner().invoke(make_app(), ["serve", str(checkpoint), "--port", "0", *arguments])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.replace("\u2502", " ").split())


def test_a_port_in_use_is_said_before_a_model_is_loaded(documented, checkpoint):
    port = documented[0].rpartition(":")[2]
    result = CliRunner().invoke(make_app(), ["serve", "/no/such/model", "--port", port])
    assert (result.exit_code, "in use" in result.output) == (2, True)
