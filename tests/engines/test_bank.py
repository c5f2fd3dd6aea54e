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
@given(histories(), st.integers(1, 6), st.integers(5, 12), st.integers(0, 12))
def test_rows_come_out_once_in_order_and_unchanged_however_late_they_are_written(history, rows, requests, patience):
    slots = requests + requests // 2
    bank = Bank(requests, LAYERS, CELL_BYTES, limit_bytes=rows * slots * LAYERS * CELL_BYTES)
    assert bank.rows == rows
    added, taken = {}, {}
    positions = dict.fromkeys(range(5), 10)
    waiting = []

    def collect(gathered):
        assert len(gathered.data) == len(gathered.input_ids) <= rows
        waiting.append(gathered)
        while len(waiting) > patience:
            write(waiting.pop(0))

    def write(gathered):
        for i, token in enumerate(gathered.input_ids.tolist()):
            taken.setdefault(gathered.request_id, []).append((gathered.start + i, token, gathered.data[i].tobytes()))
        if gathered.release is not None:
            gathered.release()

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
    for gathered in waiting:
        write(gathered)
    assert taken == added
    assert sorted(bank._free) == list(range(slots))
    assert bank.has_room(["a", "b", "c", "d", "e"])


def test_a_full_bank_says_so_instead_of_taking_more():
    bank = Bank(2, 1, 8, limit_bytes=1000)
    bank.add(0, ["a", "b"], np.array([0, 1]), np.array([5, 9]), np.array([1, 2]), np.zeros((2, 8), np.uint8))
    assert bank.has_room(["a", "b"])
    assert not bank.has_room(["a", "c"])
    bank.drop("b")
    assert bank.has_room(["a", "c"])


def test_rows_that_go_on_are_copied_only_where_no_place_is_free():
    bank = Bank(2, 1, 8, limit_bytes=3 * 8)
    out = []
    for step in range(5):
        cells = np.full((1, 8), step, np.uint8)
        out += bank.add(step, ["a"], np.array([0]), np.array([step]), np.array([step]), cells)
    assert [gathered.release is None for gathered in out] == [False, True, True, True, True]
    assert [gathered.data[0, 0, 0] for gathered in out] == [0, 1, 2, 3, 4]
    assert [np.shares_memory(gathered.data, bank._data) for gathered in out] == [True, False, False, False, False]
    out[0].release()
    out = bank.add(5, ["a"], np.array([0]), np.array([5]), np.array([5]), np.full((1, 8), 5, np.uint8))
    assert out[0].release is not None
    assert bank.has_room(["a", "b"])
