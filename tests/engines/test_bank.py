"""Gathered rows against a plain list of what was added."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.engines.bank import Bank

CELL_BYTES, LAYERS = 4, 3


@st.composite
def histories(draw):
    """Steps: which of five requests add a row, and where a request jumps back (a replay or rejected drafts)."""
    return draw(
        st.lists(
            st.tuples(st.sets(st.integers(0, 4), min_size=1), st.sets(st.integers(0, 4)), st.permutations(range(5))),
            max_size=40,
        )
    )


@settings(deadline=None)
@given(histories(), st.integers(1, 6))
def test_rows_come_out_once_in_order_and_unchanged(history, rows):
    bank = Bank(5, LAYERS, CELL_BYTES, limit_bytes=rows * 5 * LAYERS * CELL_BYTES)
    assert bank.rows == rows
    added, taken = {}, {}
    positions = dict.fromkeys(range(5), 10)

    def collect(gathered):
        assert len(gathered.data) == len(gathered.input_ids) <= rows
        for i, token in enumerate(gathered.input_ids.tolist()):
            taken.setdefault(gathered.request_id, []).append((gathered.start + i, token, gathered.data[i].tobytes()))

    for step, (present, jumping, order) in enumerate(history):
        names = [request for request in order if request in present]
        for request in jumping:
            positions[request] = max(0, positions[request] - 2)
        cells = np.random.default_rng(step).integers(0, 256, (7 + len(names) * LAYERS, CELL_BYTES)).astype(np.uint8)
        places = np.random.default_rng(step).permutation(len(names)) if step % 2 else np.arange(len(names))
        first_cells = 7 + places * LAYERS
        at = np.array([positions[request] for request in names])
        ids = at * 100 + step
        for i, request in enumerate(names):
            row = cells[first_cells[i] : first_cells[i] + LAYERS].tobytes()
            added.setdefault(f"r{request}", []).append((int(at[i]), int(ids[i]), row))
            positions[request] += 1
        for gathered in bank.add(step, [f"r{request}" for request in names], first_cells, at, ids, cells):
            collect(gathered)
    for request in range(5):
        gathered = bank.take(f"r{request}")
        if gathered is not None:
            collect(gathered)
        bank.drop(f"r{request}")
    assert taken == added
    assert bank.has_room(["a", "b", "c", "d", "e"])


def test_a_full_bank_says_so_instead_of_taking_more():
    bank = Bank(2, 1, 8, limit_bytes=1000)
    bank.add(0, ["a", "b"], np.array([0, 1]), np.array([5, 9]), np.array([1, 2]), np.zeros((2, 8), np.uint8))
    assert bank.has_room(["a", "b"])
    assert not bank.has_room(["a", "c"])
    bank.drop("b")
    assert bank.has_room(["a", "c"])
