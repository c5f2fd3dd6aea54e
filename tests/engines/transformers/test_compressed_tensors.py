"""Checkpoints of compressed-tensors: rows are those of the quantized model itself, in one forward of plain transformers."""

import pytest
import torch
import transformers
from quantized_cases import assert_rows_are_its_own, save_compressed, small_llama

pytest.importorskip("compressed_tensors", reason="compressed-tensors, which unpacks the weights, isn't installed")
METHODS = {
    "int4": 1e-4,
    "int4-zero-points": 1e-4,
    "int8": 1e-4,
    "fp8": 1e-4,
    # what rounds to another code moves a row by a whole step
    "int8-activations": 5e-2,
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_compressed_model_are_those_of_its_own_single_forward(method, tmp_path):
    whole = small_llama()
    checkpoint = save_compressed(whole, method, tmp_path / "compressed")
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert_rows_are_its_own(checkpoint, whole, reference, "compressed-tensors", METHODS[method], tmp_path)
