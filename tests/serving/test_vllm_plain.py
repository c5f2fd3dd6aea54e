"""Plain `vllm serve` with the connector and nothing else of ours: paths where vLLM has a place for them, tags everywhere."""

import importlib.util
import json

import openai
import pytest
from serve_process import serving
from transformers import AutoModelForCausalLM
from vllm_process import SMALL, STOCK, vllm_serving

from layertap import load_hidden_states
from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError
from layertap.testing import oracle

LAYERS = [1, 2, 3, 4]
SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
}
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed here"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Client, store and reference model: the documented command with only the connector's name changed."""
    import checkpoints

    folder = tmp_path_factory.mktemp("plain")
    checkpoint = checkpoints.save("llama", folder)
    transfer = {"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(folder / "store")}}  # fmt: skip
    with (
        vllm_serving(
            STOCK, str(checkpoint), "--served-model-name", "tiny", *SMALL, "--speculative_config", json.dumps(SPECULATIVE),
            "--kv_transfer_config", json.dumps(transfer),
        ) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):  # fmt: skip
        yield client, folder / "store", AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()


def complete(plain, capture, **body):
    extra = {"return_token_ids": True, "kv_transfer_params": capture}
    return plain[0].completions.create(model="tiny", prompt="The future of AI is", extra_body=extra, **body)


def check(plain, states, tokens):
    expected = oracle.hidden_states(plain[2], list(tokens), LAYERS)
    assert states["token_ids"].tolist() == list(tokens)
    assert float(((states["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-4


def test_an_answer_has_its_path_as_documented(plain):
    answer = complete(plain, {"include_output_tokens": True}, max_tokens=5)
    (choice,) = answer.choices
    states = load_hidden_states(answer.kv_transfer_params["hidden_states_path"])
    check(plain, states, (choice.prompt_token_ids + choice.token_ids)[:-1])


def test_a_tag_finds_streams_and_choices_and_serve_files_hands_them_over(plain):
    streamed = complete(plain, {"tag": "streamed", "include_output_tokens": True}, max_tokens=4, stream=True)
    chunks = [chunk.choices[0] for chunk in streamed]
    tokens = [token for chunk in chunks for token in chunk.token_ids or []]
    several = complete(plain, {"tag": "several", "include_output_tokens": True}, max_tokens=4, n=2)
    with serving(str(plain[1]), command="serve-files") as (url, _, _), HiddenStatesClient(url, local=False) as files:
        (handle,) = files.find("streamed")
        check(plain, files.fetch(handle), (chunks[0].prompt_token_ids + tokens)[:-1])
        handles = files.find("several")
        assert len(handles) == 2
        wanted = sorted((choice.prompt_token_ids + choice.token_ids)[:-1] for choice in several.choices)
        assert sorted(files.fetch(handle)["token_ids"].tolist() for handle in handles) == wanted


@pytest.mark.parametrize("capture", [{"layer": [1]}, {"layers": [0]}, {"positions": [0, 99]}])
def test_a_wrong_option_is_refused_and_the_server_lives(plain, capture):
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params|layers"):
        complete(plain, capture, max_tokens=2)
    assert complete(plain, {"capture": False}, max_tokens=1).kv_transfer_params is None


def test_who_leaves_gets_the_reason_by_its_tag(plain):
    stream = complete(plain, {"tag": "left"}, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    with serving(str(plain[1]), command="serve-files") as (url, _, _), HiddenStatesClient(url, local=False) as files:
        (handle,) = files.find("left")
        with pytest.raises(HiddenStatesError, match="aborted"):
            files.fetch(handle, timeout=60)
