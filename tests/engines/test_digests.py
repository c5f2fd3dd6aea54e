"""The device's row digests against the xxhash library, and its search for values that aren't finite.

Without a GPU the kernel runs in Triton's interpreter.
"""

import numpy as np

from layertap.engines.digests import finish_digests
from layertap.files.format import row_digests

SCRIPT = """
import sys
import numpy as np, torch
from layertap.engines.digests import finish_digests, start_digests
from layertap.files.format import row_digests
device = sys.argv[1]
rng = np.random.default_rng(0)
for row_bytes in (248, 320, 584, 1024, 1032, 1088, 2048, 2336):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        data = torch.from_numpy(rng.standard_normal((11, row_bytes // dtype.itemsize))).to(dtype)
        for row, value in ((2, float("nan")), (4, float("inf")), (5, -float("inf")), (8, torch.finfo(dtype).max), (9, -0.0)):
            data[row, int(rng.integers(data.shape[1]))] = value
        if dtype == torch.bfloat16:
            data[10, -1] = float("inf")
        ids = np.array([0, 1, 2, 49151, 151935, 2**31 - 1, 7, 8, 9, 10, 11])
        found = start_digests(data.to(device).view(11, 1, -1), torch.from_numpy(ids).to(device)).cpu().numpy()
        raw = data.view(torch.uint8).numpy()
        assert (finish_digests(found.view(np.uint64), ids, row_bytes) == row_digests(raw, ids)).all(), row_bytes
        finite = torch.isfinite(data.float()).all(1).numpy()
        assert ((found[:, -1] == 0) == finite).all(), (row_bytes, dtype)
for hidden, slots in ((64, 5), (248, 1), (576, 3)):
    size = (11, slots, hidden + 8)
    data = rng.integers(0, 0x7F, size, dtype=np.uint8) | rng.integers(0, 2, size, dtype=np.uint8) << 7
    data[:, :, hidden:] = 0x7F  # the scale is no value
    data[2, 0, 5], data[3, -1, hidden - 1], data[7, -1, 0] = 0x7F, 0xFF, 0xFF
    found = start_digests(torch.from_numpy(data).to(device), torch.from_numpy(ids).to(device)).cpu().numpy()
    raw = data.reshape(11, -1)
    assert (finish_digests(found.view(np.uint64), ids, raw.shape[1]) == row_digests(raw, ids)).all(), hidden
    assert np.flatnonzero(found[:, -1]).tolist() == [2, 3, 7]
print("equal")
"""


def test_the_kernels_digests_are_those_of_the_library_and_rows_that_are_not_finite_are_found(assert_equal):
    assert_equal(SCRIPT)


def test_no_rows_no_digests():
    nothing = finish_digests(np.zeros((0, 8), np.uint64), np.zeros(0, np.int64), 1024)
    assert nothing.tolist() == row_digests(np.zeros((0, 1024), np.uint8), np.zeros(0, np.int64)).tolist() == []
