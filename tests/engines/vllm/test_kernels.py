"""The tap's Triton kernel against the op's CPU form, through Triton's interpreter where there is no CUDA device."""

SCRIPT = """
import sys
import numpy as np, torch
from layertap.engines.vllm import ops
from layertap.engines.vllm.kernels import tap_rows
from layertap.engines.vllm.rowmap import SKIP

device = sys.argv[1]
STEP = 4321
rng = np.random.default_rng(0)


def values(dtype, *shape):
    drawn = torch.randn(shape)
    # Triton's interpreter cuts bfloat16 off instead of rounding it, so sums have to be exact there
    return (drawn if device == "cuda" else drawn.mul(8).round().clamp(-60, 60)).to(dtype).to(device)


for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for width in (1, 40, 2048, 4100):  # narrower than a block, whole, and with a remainder
        for with_residual in (False, True):
            num_taps, num_plans, num_rows = 4, 5, 23
            # each plan takes some of the taps, the last none; each row has cells of its own, in any order
            table = np.full((num_plans, num_taps), SKIP, np.int32)
            for plan in range(num_plans - 1):
                taken = rng.permutation(num_taps)[: 1 + plan % num_taps]
                table[plan, taken] = np.arange(len(taken))
            plans = rng.integers(0, num_plans, num_rows).astype(np.int32)
            destinations = (rng.permutation(num_rows) * num_taps).astype(np.int32)
            skipped = rng.random(num_rows) < 0.3
            destinations[skipped] = SKIP
            plans[skipped] = rng.integers(-2**31, 2**31 - 1, skipped.sum())  # whatever was in the buffer
            # a batch may be padded beyond the map, and the map beyond the batch; rows may be views of wider ones
            for rows_there in (num_rows + 3, num_rows, num_rows - 6, 0):
                hidden = values(dtype, rows_there, width + 3)[:, :width]
                residual = values(dtype, rows_there, width) if with_residual else None
                arena = torch.full((num_rows * num_taps, width), -7.0, dtype=dtype)
                stamps = torch.full((len(arena),), 5, dtype=torch.int32)
                maps = [torch.from_numpy(one) for one in (destinations, plans, table)]
                wanted, wanted_stamps = arena.clone(), stamps.clone()
                arena, stamps = arena.to(device), stamps.to(device)
                there = torch.tensor([arena.data_ptr(), STEP, stamps.data_ptr()]).to(device)
                here = torch.tensor([ops.register_cpu_arena(wanted, wanted_stamps), STEP, 0])
                for tap in range(num_taps):
                    tap_rows(hidden, residual, *(one.to(device) for one in maps), there, tap)
                    ops._tap_cpu(hidden.cpu(), None if residual is None else residual.cpu(), *maps, here, tap)
                ops.forget_cpu_arena(wanted.data_ptr())
                assert rows_there == 0 or (wanted_stamps == STEP).any()
                assert torch.equal(stamps.cpu(), wanted_stamps), (dtype, width, with_residual, rows_there)
                assert torch.equal(arena.cpu(), wanted), (dtype, width, with_residual, rows_there)
print("equal")
"""


def test_the_kernel_writes_what_the_cpus_op_writes(assert_equal):
    assert_equal(SCRIPT)
