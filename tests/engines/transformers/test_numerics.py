"""Values at the ends of a dtype: what overflows is reported with its place and a way out, and what doesn't is kept exactly."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from layertap import LLM, ExtractionError, HiddenStatesError, SamplingParams, load_hidden_states
from layertap.testing import oracle, zoo

CALM = [40, 41, 42, 43]
LOUD = 77  # the token whose embedding is made large
PROMPT = [40, 41, LOUD, 43]


def save(folder, loudest):
    """A tiny llama in which the embedding of one token goes up to `loudest`."""
    checkpoint = zoo.save("llama", folder)
    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name][LOUD] *= loudest / weights[name][LOUD].abs().max()
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def extract(llm, prompts, **options):
    """Samples by index, and the failures."""
    found = {}
    try:
        for sample in llm.extract([{"prompt_token_ids": ids} for ids in prompts], layers="all", **options):
            found[sample.index] = sample
    except ExtractionError as error:
        return found, dict(error.failures)
    return found, {}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """In float16, with a token whose stream leaves the range in block 0: it enters with 65,000, and the block adds to it."""
    checkpoint = save(tmp_path_factory.mktemp("overflow"), 1.0)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 3000
    weights["model.embed_tokens.weight"][LOUD] = 65_000.0 * weights["model.embed_tokens.weight"][LOUD].sign()
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("save_dtype", ["float16", "float32", "bfloat16"])
def test_activations_that_overflow_float16_fail_their_request_with_place_and_way_out(overflowing, save_dtype, tmp_path):
    with LLM(overflowing, dtype="float16") as llm:
        found, failed = extract(llm, [CALM, PROMPT], save_dtype=save_dtype, storage=tmp_path)
    assert (list(found), list(failed)) == ([0], [1])
    assert "NaN or infinity, first at position 2, layer 1" in failed[1]
    assert "float16" in failed[1].replace("bfloat16", "")
    assert "bfloat16" in failed[1]
    assert len(list(tmp_path.glob("*.safetensors"))) == len(found)


def test_the_same_model_runs_in_the_dtype_that_the_message_names(overflowing):
    with LLM(overflowing, dtype="bfloat16") as llm:
        found, failed = extract(llm, [PROMPT])
    assert failed == {}
    assert float(found[0].hidden_states.float().abs().max()) > 65504


@pytest.mark.parametrize("save_dtype", ["float16", "bfloat16"])
def test_rows_of_float32_beyond_the_range_of_the_saved_dtype_fail_and_are_not_clipped(save_dtype, tmp_path):
    checkpoint = save(tmp_path, 3.4e38 if save_dtype == "bfloat16" else 1e5)
    with LLM(checkpoint, dtype="float32", layers=[0], storage=tmp_path / "states") as llm:
        (sample,) = llm.extract([{"prompt_token_ids": CALM}], layers=[0], save_dtype=save_dtype)
        assert torch.isfinite(sample.hidden_states).all()
        with pytest.raises(ExtractionError, match=r"first at position 2, layer 0 .*float32"):
            list(llm.extract([{"prompt_token_ids": PROMPT}], layers=[0], save_dtype=save_dtype))
        (sample,) = llm.extract([{"prompt_token_ids": PROMPT}], layers=[0], save_dtype="float32")
        assert float(sample.hidden_states[2].abs().max()) == pytest.approx(3.4e38 if save_dtype == "bfloat16" else 1e5)


def test_a_generation_that_overflows_gives_its_reader_the_same_reason(tmp_path):
    checkpoint = save(tmp_path, 1e5)
    transfer = {"save_dtype": "float16", "layers": [0, 1]}
    with LLM(checkpoint, dtype="float32", layers="all", storage=tmp_path / "states") as llm:
        params = SamplingParams(max_tokens=2, temperature=0, extra_args={"kv_transfer_params": transfer})
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        with pytest.raises(HiddenStatesError, match=r"position 2, layer 0 \(float16 ends at 65504: take bfloat16"):
            load_hidden_states(output.kv_transfer_params["hidden_states_path"])


def test_massive_activations_are_those_of_the_model_bit_for_bit_in_16_bits(tmp_path):
    checkpoint = save(tmp_path, 25_000.0)
    with LLM(checkpoint, dtype="float32") as llm:
        exact, _ = extract(llm, [PROMPT])
        rows = exact[0].hidden_states
        truth = oracle.hidden_states(
            AutoModelForCausalLM.from_pretrained(checkpoint), PROMPT, range(llm.info.num_layers + 1)
        )
        assert float(((rows - truth).norm(dim=-1) / truth.norm(dim=-1)).max()) < 1e-5
        assert float(rows[2].abs().amax(dim=-1).min()) > 20_000 > 100 * float(rows[0].abs().max())
        for name in ("bfloat16", "float16"):
            saved, failed = extract(llm, [PROMPT], save_dtype=name)
            assert failed == {}
            assert torch.equal(saved[0].hidden_states, rows.to(getattr(torch, name)))
