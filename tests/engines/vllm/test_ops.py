"""The op on the CPU against indexing by hand, eager and compiled."""

import pytest
import torch

from layertap.engines.vllm import ops
from layertap.engines.vllm.rowmap import SKIP

WIDTH, TAPS, GENERATION = 6, 3, 1234
TABLE = torch.tensor([[0, 1, SKIP], [1, 0, SKIP], [SKIP, SKIP, 0]], dtype=torch.int32)
DESTINATIONS = torch.tensor([0, SKIP, 2, 4, SKIP, 6, 7], dtype=torch.int32)
# rows that aren't captured carry whatever was in the buffer
PLANS = torch.tensor([0, -1_089_424_320, 1, 1, 2_000_000_000, 2, 2], dtype=torch.int32)


def run_taps(function, arena, stamps):
    hidden, residual = torch.randn(len(PLANS), WIDTH), torch.randn(len(PLANS), WIDTH)
    control = torch.tensor([ops.register_cpu_arena(arena, stamps), GENERATION, 0])
    try:
        for tap in range(TAPS):
            function(hidden, residual if tap else None, control, tap)
    finally:
        ops.forget_cpu_arena(arena.data_ptr())
    return hidden, residual


def expected(hidden, residual, arena):
    wanted = arena.clone()
    for row, (cell, plan) in enumerate(zip(DESTINATIONS.tolist(), PLANS.tolist(), strict=True)):
        for tap in range(TAPS):
            if cell >= 0 and TABLE[plan, tap] >= 0:
                wanted[cell + TABLE[plan, tap]] = hidden[row] + (residual[row] if tap else 0)
    return wanted


def tap_op(hidden, residual, control, tap):
    torch.ops.layertap.tap(hidden, residual, DESTINATIONS, PLANS, TABLE, control, tap)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_each_captured_row_lands_in_its_cell_and_nothing_else_is_touched(compiled):
    ops.define()
    torch.manual_seed(0)
    arena = torch.full((10, WIDTH), -7.0)
    before = arena.clone()
    function = torch.compile(tap_op, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else tap_op
    stamps = torch.full((10,), 5, dtype=torch.int32)
    hidden, residual = run_taps(function, arena, stamps)
    wanted = expected(hidden, residual, before)
    torch.testing.assert_close(arena, wanted, rtol=0, atol=0)
    written = (wanted != before).any(dim=1)
    assert stamps.tolist() == [GENERATION if one else 5 for one in written]


def test_without_an_arena_nothing_happens():
    ops.define()
    tap_op(torch.randn(7, WIDTH), None, torch.zeros(ops.CONTROL_SIZE, dtype=torch.int64), 0)
