"""The formula for tokens and blocks, and reading of sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layertap.engines.transformers import budget
from layertap.engines.transformers.budget import ARENAS, Costs, arena_bytes, device_room, fits, make_plan, parse_memory

GIB = 2**30
# One block of the Qwen3-32B shape: 488 million parameters of 2 bytes, at 680 TFLOP/s and 55 GB/s.
BLOCK = 975_000_000
BIG = Costs(seconds_per_token=2 * 487.5e6 / 680e12, seconds_per_copy=BLOCK / 55e9, bytes_per_token=250_000)


def test_a_dense_model_needs_the_ratio_of_both_rates_whatever_its_size():
    plan = make_plan(BIG, num_blocks=64, block_bytes=BLOCK, room=5 * GIB, tokens=16_384, fixed=True)
    assert plan.resident == 1
    assert plan.needed == pytest.approx(63 / 64 * 680e12 / 55e9, rel=1e-3)


def test_the_budget_grows_until_the_copies_are_hidden_and_no_further():
    slow_copies = Costs(
        seconds_per_token=BIG.seconds_per_token, seconds_per_copy=2 * BIG.seconds_per_copy, bytes_per_token=250_000
    )
    plan = make_plan(slow_copies, num_blocks=64, block_bytes=BLOCK, room=12 * GIB, tokens=16_384)
    assert plan.tokens >= 1.25 * plan.needed > plan.tokens - 2048
    assert make_plan(BIG, num_blocks=64, block_bytes=BLOCK, room=40 * GIB, tokens=16_384).tokens == 16_384


def test_memory_bounds_the_budget():
    plan = make_plan(BIG, num_blocks=64, block_bytes=BLOCK, room=GIB, tokens=16_384)
    assert plan.resident == 0
    assert plan.tokens == GIB // 250_000 // 1024 * 1024


@given(
    room=st.integers(0, 80 * GIB),
    num_blocks=st.integers(1, 90),
    copy=st.floats(0, 1),
    compute=st.floats(1e-9, 1e-3),
    per_token=st.floats(0, 1e6),
    fixed=st.booleans(),
)
def test_a_plan_stays_within_the_room_unless_it_is_too_small_for_any(room, num_blocks, copy, compute, per_token, fixed):
    costs = Costs(seconds_per_token=compute, seconds_per_copy=copy, bytes_per_token=per_token)
    plan = make_plan(costs, num_blocks=num_blocks, block_bytes=BLOCK, room=room, tokens=4096, fixed=fixed)
    assert 0 <= plan.resident <= num_blocks
    assert plan.tokens == 4096 if fixed else plan.tokens >= 1024
    if plan.tokens > 1024 and not fixed:
        assert plan.tokens * per_token + plan.resident * BLOCK <= room
    streamed = num_blocks - plan.resident
    assert not plan.resident or streamed <= 3 or streamed % 3 != 1


def test_weights_fit_when_an_eighth_is_left_for_the_work():
    assert fits(10**15, None)
    assert fits(7 * GIB, 8 * GIB)
    assert not fits(7 * GIB + 1, 8 * GIB)


def test_rows_get_a_part_of_a_small_memory(monkeypatch):
    monkeypatch.setattr(budget, "memory_bytes", lambda: 128 * GIB)
    assert arena_bytes(None) == 2 * GIB
    assert arena_bytes(141 * GIB) == 2 * GIB
    assert ARENAS * arena_bytes(24 * GIB) < 24 * GIB // 5
    monkeypatch.setattr(budget, "memory_bytes", lambda: 16 * GIB)
    assert ARENAS * arena_bytes(141 * GIB) <= 4 * GIB


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("500 MB", 500 * 10**6), ("1.5g", 1_500_000_000), (7, 7), ("123", 123), (None, None)],
)
def test_sizes_are_read(text, size):
    assert parse_memory(text) == size


def test_a_cpu_has_any_amount_unless_told():
    assert device_room(torch.device("cpu"), None) is None
    assert device_room(torch.device("cpu"), 5) == 5
