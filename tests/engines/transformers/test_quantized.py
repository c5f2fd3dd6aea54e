"""Checkpoints of torchao: rows are those of the quantized model itself, in one forward of plain transformers."""

import pytest
import torch
import transformers
from quantized_cases import assert_rows_are_its_own, small_llama

from layertap.testing.tokenizer import byte_tokenizer

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
    whole = small_llama()
    whole.save_pretrained(folder / "whole")
    chosen = transformers.TorchAoConfig(getattr(quantization, METHODS[method][0])())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "whole", dtype=torch.float32, quantization_config=chosen, device_map="cpu"
    )
    model.save_pretrained(folder / "quantized")
    byte_tokenizer().save_pretrained(folder / "quantized")
    return folder / "quantized", whole


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_quantized_model_are_those_of_its_own_single_forward(method, tmp_path):
    checkpoint, whole = save_quantized(tmp_path, method)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, device_map="cpu")
    assert_rows_are_its_own(checkpoint, whole, reference, "torchao", METHODS[method][1], tmp_path)
