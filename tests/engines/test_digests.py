"""The device's row digests against the xxhash library. Without a GPU the kernel runs in Triton's interpreter."""

import os
import subprocess
import sys

import numpy as np
import pytest

from layertap.engines.digests import finish_digests
from layertap.files.format import row_digests

pytest.importorskip("triton", reason="the kernel is Triton's")

SCRIPT = """
import sys
import numpy as np, torch
from layertap.engines.digests import finish_digests, start_digests
from layertap.files.format import row_digests
device = sys.argv[1]
rng = np.random.default_rng(0)
for row_bytes in (256, 320, 1024, 1088, 2048, 2304, 4096 + 64):
    data = rng.integers(0, 256, (11, row_bytes), dtype=np.uint8)
    ids = np.array([0, 1, 2, 49151, 151935, 2**31 - 1, 7, 8, 9, 10, 11])
    rows = torch.from_numpy(data).to(device).view(11, 1, row_bytes)
    accumulators = start_digests(rows, torch.from_numpy(ids).to(device)).cpu().numpy().view(np.uint64)
    assert (finish_digests(accumulators, ids, row_bytes) == row_digests(data, ids)).all(), row_bytes
print("equal")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernels_digests_are_those_of_the_library(device):
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}
    done = subprocess.run([sys.executable, "-c", SCRIPT, device], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr


def test_no_rows_no_digests():
    nothing = finish_digests(np.zeros((0, 8), np.uint64), np.zeros(0, np.int64), 1024)
    assert nothing.tolist() == row_digests(np.zeros((0, 1024), np.uint8), np.zeros(0, np.int64)).tolist() == []
