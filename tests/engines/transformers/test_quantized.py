"""Quantized checkpoints: rows are those of the quantized model itself, in one forward of plain transformers."""

import numpy as np
import pytest
import torch
import transformers

from layertap import LLM, SamplingParams, load_hidden_states
from layertap.testing.tokenizer import byte_tokenizer
from layertap.testing.weights import randomise

PROMPTS = [[9 + 3 * i + j for j in range(length)] for i, length in enumerate((6, 32, 17, 3))]

quantization = pytest.importorskip(
    "torchao.quantization", reason="torchao, which quantizes the weights, isn't installed"
)
METHODS = {
    "int8": ("Int8WeightOnlyConfig", 1e-4),
    "int4-in-int8": ("IntxWeightOnlyConfig", 1e-4),
    "fp8": ("Float8WeightOnlyConfig", 1e-4),
    # what rounds to another code moves a row by a whole step
    "int8-activations": ("Int8DynamicActivationInt8WeightConfig", 5e-2),
}


def save_quantized(folder, method):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=320
    )
    whole = transformers.LlamaForCausalLM(config).float().eval()
    randomise(whole, 0)
    whole.save_pretrained(folder / "whole")
    chosen = transformers.TorchAoConfig(getattr(quantization, METHODS[method][0])())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "whole", dtype=torch.float32, quantization_config=chosen, device_map="cpu"
    )
    model.save_pretrained(folder / "quantized")
    byte_tokenizer().save_pretrained(folder / "quantized")
    return folder / "quantized", whole


def own_rows(model, token_ids):
    """All layers of one prompt, by hooks on the blocks."""
    seen = []
    blocks = model.model.layers
    handles = [
        block.register_forward_pre_hook(lambda _, args, given: seen.append(args[0] if args else given["hidden_states"]),
                                        with_kwargs=True)
        for block in blocks
    ]  # fmt: skip
    handles.append(blocks[-1].register_forward_hook(lambda _, args, out: seen.append(out)))
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([rows[0] for rows in seen], dim=1)


def worst(rows, exact):
    return float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_quantized_model_are_those_of_its_own_single_forward(method, tmp_path):
    checkpoint, whole = save_quantized(tmp_path, method)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, device_map="cpu")
    tolerance = METHODS[method][1]
    params = SamplingParams(
        max_tokens=6,
        temperature=0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    with LLM(checkpoint, dtype="float32", layers="all", storage=tmp_path / "states") as llm:
        assert llm.info.quantization == "torchao"
        for sample in llm.extract(PROMPTS, layers="all"):
            exact = own_rows(reference.eval(), PROMPTS[sample.index])
            assert worst(torch.as_tensor(np.asarray(sample.hidden_states)), exact) < tolerance
            if sample.index == 1:  # the quantization is really on
                assert worst(exact, own_rows(whole, PROMPTS[1])) > 1e-2
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        for output in llm.generate(prompts, params, use_tqdm=False):
            loaded = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
            assert worst(loaded["hidden_states"], own_rows(reference, loaded["token_ids"].tolist())) < tolerance
