"""GPTQ and AWQ checkpoints, where gptqmodel (and for GPTQ optimum) can run them: rows are those of the codes times their scales."""

import pytest
from quantized_cases import assert_rows_are_its_own, save_packed, small_llama

pytest.importorskip("gptqmodel", reason="gptqmodel, which transformers runs GPTQ and AWQ with, isn't installed")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_rows_of_packed_checkpoints_are_those_of_their_weights(method, tmp_path):
    if method == "gptq":
        pytest.importorskip("optimum", reason="optimum, which transformers loads GPTQ with, isn't installed")
    whole = small_llama()
    checkpoint, exact = save_packed(whole, method, tmp_path / method)
    assert_rows_are_its_own(checkpoint, whole, exact, method, 1e-4, tmp_path)
