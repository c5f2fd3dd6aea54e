"""GPTQ and AWQ checkpoints, where gptqmodel (and for GPTQ optimum) can run them: rows are those of the model's own forward."""

import pytest
import torch
import transformers
from quantized_cases import PROMPTS, assert_rows_are_its_own, own_rows, save_packed, small_llama, worst

pytest.importorskip("gptqmodel", reason="gptqmodel, which transformers runs GPTQ and AWQ with, isn't installed")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_rows_of_packed_checkpoints_are_those_of_the_models_own_single_forward(method, tmp_path):
    if method == "gptq":
        pytest.importorskip("optimum", reason="optimum, which transformers loads GPTQ with, isn't installed")
    whole = small_llama()
    checkpoint, exact = save_packed(whole, method, tmp_path / method)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, device_map="cpu"
    ).eval()
    assert worst(own_rows(reference, PROMPTS[1]), own_rows(exact, PROMPTS[1])) < 5e-2  # its kernels compute in 16 bits
    assert_rows_are_its_own(checkpoint, whole, reference, method, 2e-2, tmp_path)
