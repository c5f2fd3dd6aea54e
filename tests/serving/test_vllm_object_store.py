"""`layertap serve --engine vllm --handover s3://...`: files of vLLM's engine go to a bucket and come back checked."""

import importlib.util
import json
import signal

import httpx
import pytest
from transformers import AutoModelForCausalLM
from vllm_process import LAYERTAP, SMALL, vllm_serving
from waiting import wait_until

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, MissingError
from layertap.testing import oracle

LAYERS = (1, 2, 4)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed here"),
]


@pytest.fixture(scope="module")
def shipping(tmp_path_factory):
    """Address, store, bucket, reference model and process."""
    s3 = pytest.importorskip("s3", reason="moto or s3fs isn't installed here")
    import checkpoints

    folder = tmp_path_factory.mktemp("vllm-s3")
    checkpoint = checkpoints.save("llama", folder)
    with (
        s3.bucket() as bucket,
        vllm_serving(
            LAYERTAP, str(checkpoint), "--engine", "vllm", "--served-model-name", "tiny", *SMALL, "--layers", "1,2,4",
            "--storage", str(folder / "store"), "--handover", bucket, "--allow-delete",
        ) as (url, process),
    ):  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
        yield url, folder / "store", bucket, model, process


def check(shipping, states, tokens):
    expected = oracle.hidden_states(shipping[3], list(tokens), list(LAYERS))
    assert states["token_ids"].tolist() == list(tokens)
    assert float(((states["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-4


def test_each_choice_comes_back_from_the_bucket_by_handle_by_id_and_by_tag(shipping):
    url, store, bucket, *_ = shipping
    with HiddenStatesClient(url) as client:
        answer = client.complete(
            ["to the", "bucket"], n=2, model="tiny", max_tokens=4, ignore_eos=True, return_token_ids=True,
            kv_transfer_params={"include_output_tokens": True, "tag": "bucketed"},
        )  # fmt: skip
        for choice, found in zip(answer["choices"], client.find("bucketed"), strict=True):
            handle = choice["kv_transfer_params"]
            name = handle["hidden_states_id"]
            assert handle["hidden_states_url"] == handle["hidden_states_path"] == f"{bucket}/{name}.safetensors"
            assert found["hidden_states_url"] == handle["hidden_states_url"]
            tokens = (choice["prompt_token_ids"] + choice["token_ids"])[:-1]
            for known_by in (choice, name, found):
                check(shipping, client.fetch(known_by), tokens)
        client.delete(answer["choices"][0])
        with pytest.raises(MissingError):
            client.fetch(answer["id"])
    wait_until(lambda: not list(store.glob("*.safetensors")), "the copies here stay")


def test_a_stream_that_is_left_leaves_its_reason_in_the_bucket(shipping):
    url, _, bucket, *_ = shipping
    body = {"model": "tiny", "prompt": "leave", "max_tokens": 240, "ignore_eos": True, "stream": True,
            "kv_transfer_params": {"tag": "left"}}  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    with HiddenStatesClient(url) as client:
        (handle,) = client.find("left")
        assert handle["hidden_states_url"].startswith(bucket)
        with pytest.raises(HiddenStatesError, match="aborted"):
            client.fetch(handle, timeout=60)


def test_the_last_chunk_of_a_stream_names_the_object(shipping):
    url = shipping[0]
    body = {"model": "tiny", "prompt": "a stream", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    with HiddenStatesClient(url) as client:
        assert client.fetch(chunks[-1]["choices"][0])["hidden_states"].shape[1:] == (3, 64)


def test_sigterm_finishes_what_runs_and_sends_it(shipping):
    url, store, _, _, process = shipping
    body = {"model": "tiny", "prompt": "a long answer", "max_tokens": 150, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}  # fmt: skip
    chunks = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:])["choices"][0])
                if len(chunks) == 3:
                    process.send_signal(signal.SIGTERM)
    assert chunks[-1]["finish_reason"] == "length"
    process.wait(120)
    tokens = chunks[0]["prompt_token_ids"] + [token for chunk in chunks for token in chunk["token_ids"]]
    with HiddenStatesClient(url) as client:  # the server is gone, the object isn't
        check(shipping, client.fetch(chunks[-1]), tokens[:-1])
    assert not list(store.glob("*.safetensors"))
