"""The error of saving rows, against NumPy's own arithmetic."""

import numpy as np
import torch

from layertap.datasets.rounding import row_errors


def test_errors_are_those_of_the_saved_rows():
    rows = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0)) * 5
    rows[2, 1] = 0
    halves = rows.numpy().astype(np.float16).astype(np.float64)
    lengths = np.maximum(np.linalg.norm(rows.double().numpy(), axis=-1), 1e-30)
    expected = np.linalg.norm(halves - rows.double().numpy(), axis=-1) / lengths
    np.testing.assert_allclose(row_errors(rows, "float16").numpy(), expected, rtol=1e-3)
    fp8 = row_errors(rows, "fp8_e4m3")
    scale = rows.abs().amax(-1, keepdim=True) / 448
    nearest = (rows / scale.clamp_min(1e-30)).to(torch.float8_e4m3fn).double() * scale
    np.testing.assert_allclose(fp8.numpy(), (nearest - rows).norm(dim=-1).numpy() / lengths, rtol=1e-3)
    assert fp8[2, 1] == 0
    assert not row_errors(rows, "float32").any()
