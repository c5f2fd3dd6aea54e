"""The row map against a plain model of what it means."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.engines.vllm.rowmap import SKIP, PlanTable, Want, fill, lay_out, wanted_rows


@st.composite
def steps(draw):
    """A batch: per request its length, tokens computed before, and what it wants (or None)."""
    num_taps = draw(st.integers(1, 5))
    batch = []
    for index in range(draw(st.integers(1, 8))):
        count, computed = draw(st.integers(1, 9)), draw(st.integers(0, 30))
        want = None
        if draw(st.booleans()):
            start = draw(st.integers(0, 35))
            layers = draw(st.lists(st.integers(0, num_taps - 1), unique=True))
            ranks = tuple(layers.index(tap) if tap in layers else SKIP for tap in range(num_taps))
            candidates = range(start, start + draw(st.integers(0, 40)))
            want = Want(candidates=candidates, ranks=ranks, num_layers=len(layers))
        batch.append((f"r{index}", count, computed, want))
    return num_taps, batch


@given(steps(), st.integers(0, 100), st.integers(0, 5))
def test_every_wanted_row_has_cells_of_its_own_and_no_other_row_has_any(step, first_cell, padding):
    num_taps, batch = step
    starts = np.cumsum([0, *(count for _, count, _, _ in batch)])
    wants = {name: want for name, _, _, want in batch if want is not None}
    plans = PlanTable(8, num_taps)
    chunks, num_cells = lay_out([b[0] for b in batch], starts, [b[2] for b in batch], wants, plans)
    num_rows = int(starts[-1])
    destinations = np.full(num_rows + padding, 12345, np.int32)
    plan_ids = np.zeros(num_rows + padding, np.int32)
    fill(destinations, plan_ids, chunks, first_cell, num_rows)
    used = []
    for (_, count, computed, want), begin in zip(batch, starts, strict=False):
        for i in range(count):
            row = int(begin) + i
            if want is None or not want.num_layers or computed + i not in want.candidates:
                assert destinations[row] == SKIP
                continue
            for tap in range(num_taps):
                rank = plans.table[plan_ids[row], tap]
                assert rank == want.ranks[tap]
                if rank != SKIP:
                    used.append(int(destinations[row] + rank))
    assert sorted(used) == list(range(first_cell, first_cell + num_cells))
    assert (destinations[num_rows:] == 12345).all()


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 6), st.integers(0, 50), st.integers(0, 30), st.data())
def test_rows_that_may_be_wanted_are_never_left_out_when_drafts_were_counted(upper, count, slack, first, length, data):
    candidates = range(first, first + length)
    true_start = upper - data.draw(st.integers(0, min(slack, upper)))
    begin, stop = wanted_rows(upper, count, slack, candidates)
    for i in range(count):
        if true_start + i in candidates:
            assert begin <= i < stop


def test_a_set_of_layers_keeps_its_row_while_others_are_replaced():
    plans = PlanTable(2, 2)
    (first,) = plans.rows_for([(0, SKIP)])
    assert plans.rows_for([(0, SKIP), (SKIP, 0)])[0] == first
    rows = plans.rows_for([(0, SKIP), (1, 0)])
    assert rows[0] == first
    assert plans.table[rows[1]].tolist() == [1, 0]
    with pytest.raises(ValueError, match="3 different sets"):
        plans.rows_for([(0, SKIP), (1, 0), (0, 1)])
