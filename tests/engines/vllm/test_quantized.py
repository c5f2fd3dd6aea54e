"""Quantized checkpoints on the CPU kernels of vLLM: rows are those of the weights that the codes stand for, up to rounding."""

import pytest
import running
import torch
from quantized_cases import own_rows, save_compressed, save_packed, small_llama, worst
from running import params, prompts
from transformers import AutoModelForCausalLM

from layertap import load_hidden_states
from layertap.files.read import read_header

# dtype of the kernels, how far rows may be off, and how far those of the whole weights are at least
METHODS = {
    "gptq": ("float16", 2e-2, 2e-1),
    "awq": ("float16", 2e-2, 2e-1),
    "compressed-tensors int4": ("float16", 2e-2, 2e-1),
    # what rounds to another code moves a row by a whole step, and vLLM's kernel rounds activations in its own way
    "compressed-tensors int8-activations": ("float32", 1.5e-1, 1e-3),
}
OWN = 1e-2
"""How far rows of a batch may be from those of the same tokens alone."""


def saved(method, folder):
    """A checkpoint, the float32 model that it stands for, and what it was made of."""
    # where there is AMX, widths that are multiples of 16 and 32 go to an int8 kernel of vLLM's that takes no float32
    whole = small_llama(**({"hidden_size": 104, "head_dim": 32} if method.endswith("int8-activations") else {}))
    if method in ("gptq", "awq"):
        return *save_packed(whole, method, folder / method), whole
    checkpoint = save_compressed(whole, method.removeprefix("compressed-tensors "), folder / "compressed")
    return checkpoint, AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(), whole


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_quantized_models_are_those_of_their_weights(method, tmp_path):
    dtype, tolerance, changed = METHODS[method]
    checkpoint, exact, whole = saved(method, tmp_path)
    asked = prompts([6, 90, 33], seed=1)
    with running.running(checkpoint, tmp_path / "states", {"min_free_bytes": 0}, dtype=dtype) as llm:
        outputs = llm.generate(asked, params(6, include_output_tokens=True), use_tqdm=False)
        paths = [path_of(output) for output in outputs]
        files = [load_hidden_states(path, timeout=30) for path in paths]
        alone = [
            llm.generate([{"prompt_token_ids": file["token_ids"].tolist()}], params(1), use_tqdm=False)[0]
            for file in files
        ]
        singles = [load_hidden_states(path_of(output), timeout=30)["hidden_states"].float() for output in alone]
    said = read_header(paths[0]).info.facts["quantization"]
    assert method.partition(" ")[0] in said
    for output, file, single in zip(outputs, files, singles, strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        assert file["token_ids"].tolist() == tokens
        wanted, found = own_rows(exact, tokens), file["hidden_states"]
        error, own, effect = worst(found, wanted), worst(found, single), worst(own_rows(whole, tokens), wanted)
        print(f"{method} ({said}): {error:.1e}, from its own alone {own:.1e}, whole weights {effect:.1e}")
        assert error < tolerance
        assert own < OWN
        assert effect > changed


def path_of(output):
    return output.kv_transfer_params["hidden_states_path"]
