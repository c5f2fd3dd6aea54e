"""The merge by absolute position against a model that is too simple to be wrong: a dict from (position, slot) to bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_memory import peak_bytes

from layertap.assembly import Assembly, Rows
from layertap.capture.request import CaptureSpec, Window
from layertap.errors import EngineError

HIDDEN = 2


def make_spec(num_layers=2, prompt_len=5, max_tokens=3, **window):
    return CaptureSpec(
        layers=tuple(range(num_layers)),
        dtype="float32",
        hidden_size=HIDDEN,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        window=Window(**window),
    )


def make_rows(step, start, ids, num_slots, first_slot=0, salt=0):
    data = np.zeros((len(ids), num_slots, HIDDEN * 4), np.uint8)
    for i, token in enumerate(ids):
        for slot in range(num_slots):
            data[i, slot] = (step * 31 + (start + i) * 7 + (first_slot + slot) * 3 + token + salt) % 251 + 1
    return Rows(step, start, np.array(ids, np.int64), slice(first_slot, first_slot + num_slots), data)


class Store:
    """Applies pieces as a sink does."""

    def __init__(self, spec):
        self.rows = np.zeros((len(spec.candidates), len(spec.layers), HIDDEN * 4), np.uint8)

    def apply(self, pieces):
        for piece in pieces:
            n, slots, _ = piece.data.shape
            self.rows[piece.row : piece.row + n, piece.first_slot : piece.first_slot + slots] = piece.data


@st.composite
def runs(draw):
    """A sequence and the chunks of an engine that chunks, replays, drafts wrongly and splits the layers over stages."""
    num_layers = draw(st.integers(1, 3))
    prompt_len = draw(st.integers(1, 8))
    max_tokens = draw(st.integers(0, 6))
    generated = draw(st.integers(1, max_tokens)) if max_tokens else 0
    final = [draw(st.integers(0, 9)) for _ in range(prompt_len + generated)]
    include = draw(st.booleans())
    spec = make_spec(
        num_layers, prompt_len, max_tokens, include_output=include, positions=draw(st.sampled_from([None, "last"]))
    )
    cut = draw(st.integers(0, num_layers))
    stages = [part for part in (range(cut), range(cut, num_layers)) if len(part)]
    num_rows = len(final) - (1 if generated else 0)
    chunks = []
    position, step = 0, 0
    while position < num_rows:
        step += 1
        size = draw(st.integers(1, num_rows - position))
        ids = final[position : position + size]
        drafts = (
            [draw(st.integers(10, 19)) for _ in range(draw(st.integers(0, 2)))] if position + size >= prompt_len else []
        )
        for stage in stages:
            chunks.append(make_rows(step, position, ids + drafts, len(stage), stage[0]))
        position += size
        if draw(st.booleans()) and draw(st.booleans()):
            position = draw(st.integers(0, position))  # a preemption: everything from here on is computed again
    return spec, final, chunks


@given(runs(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_chunking_replay_draft_and_order_gives_the_latest_rows(run, random):
    spec, final, chunks = run
    random.shuffle(chunks)  # stages and copies may deliver in any order
    expected, steps = {}, {}
    for chunk in chunks:
        for i, _ in enumerate(chunk.input_ids):
            for slot in range(chunk.data.shape[1]):
                key = (chunk.start + i, chunk.slots.start + slot)
                if chunk.step >= steps.get(key, -1):
                    steps[key], expected[key] = chunk.step, chunk.data[i, slot]
    assembly, store = Assembly(spec), Store(spec)
    for chunk in chunks:
        store.apply(assembly.accept(chunk))
    owed = assembly.complete(final)
    assert owed == spec.window.owed(spec.prompt_len, len(final))
    for position in owed:
        for slot in range(len(spec.layers)):
            np.testing.assert_array_equal(store.rows[position - assembly.base, slot], expected[position, slot])


@given(runs(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_lost_chunk_is_never_papered_over(run, data):
    """Drop one chunk: either another chunk covers the same rows, or completion fails; zeros are never delivered."""
    spec, final, chunks = run
    lost = data.draw(st.integers(0, len(chunks) - 1))
    rest = chunks[:lost] + chunks[lost + 1 :]
    ids = {}
    for chunk in rest:
        for i, token in enumerate(chunk.input_ids.tolist()):
            for slot in range(chunk.data.shape[1]):
                key = (chunk.start + i, chunk.slots.start + slot)
                if chunk.step >= ids.get(key, (-1, 0))[0]:
                    ids[key] = (chunk.step, token)
    assembly = Assembly(spec)
    for chunk in rest:
        assembly.accept(chunk)
    owed = spec.window.owed(spec.prompt_len, len(final))
    whole = all(
        len({ids.get((p, s), (None,))[0] for s in range(len(spec.layers))}) == 1
        and ids.get((p, 0), (0, -1))[1] == final[p]
        for p in owed
    )
    if whole:
        assembly.complete(final)
    else:
        with pytest.raises(EngineError, match="never arrived|other tokens"):
            assembly.complete(final)


def test_a_hole_names_its_position_and_layer():
    spec = make_spec(prompt_len=4, max_tokens=0)
    assembly = Assembly(spec)
    assembly.accept(make_rows(0, 0, [1, 2], 2))
    assembly.accept(make_rows(0, 3, [4], 2))
    with pytest.raises(EngineError, match="2 of 8 owed rows never arrived; the first hole is position 2, layer 0"):
        assembly.complete([1, 2, 3, 4])


def test_rows_of_another_request_are_caught_by_their_input_ids():
    spec = make_spec(prompt_len=3, max_tokens=0)
    assembly = Assembly(spec)
    assembly.accept(make_rows(0, 0, [7, 8, 9], 2))
    with pytest.raises(EngineError, match="first at position 1: computed for token 8, the sequence has 5"):
        assembly.complete([7, 5, 9])


def test_rows_shifted_by_one_are_caught():
    spec = make_spec(prompt_len=3, max_tokens=0)
    assembly = Assembly(spec)
    assembly.accept(make_rows(0, 0, [2, 3, 4], 2))
    with pytest.raises(EngineError, match="other tokens"):
        assembly.complete([1, 2, 3])


def test_a_draft_row_that_was_accepted_nowhere_is_trimmed():
    spec = make_spec(prompt_len=2, max_tokens=4, include_output=True)
    assembly = Assembly(spec)
    assembly.accept(make_rows(0, 0, [1, 2], 2))
    assembly.accept(make_rows(1, 2, [3, 99, 98], 2))
    assert assembly.complete([1, 2, 3, 4]) == range(3)


def test_an_older_step_never_overwrites_a_newer_one():
    spec = make_spec(prompt_len=2, max_tokens=0)
    assembly, store = Assembly(spec), Store(spec)
    new, old = make_rows(5, 0, [1, 2], 2, salt=100), make_rows(3, 0, [1, 2], 2)
    store.apply(assembly.accept(new))
    assert assembly.accept(old) == []
    np.testing.assert_array_equal(store.rows, new.data)
    assert assembly.replayed_rows == 2


def test_rows_of_a_wrong_shape_are_refused():
    assembly = Assembly(make_spec())
    rows = make_rows(0, 0, [1, 2], 1)
    rows.slots = slice(0, 2)
    with pytest.raises(EngineError, match="expected"):
        assembly.accept(rows)


def test_more_tokens_than_announced_are_an_error():
    assembly = Assembly(make_spec(prompt_len=2, max_tokens=1, include_output=True))
    with pytest.raises(EngineError, match="more than"):
        assembly.complete([1, 2, 3, 4, 5])


def test_a_long_limit_costs_memory_only_for_the_rows_that_come():

    spec = CaptureSpec(
        layers=tuple(range(37)),
        dtype="float32",
        hidden_size=2,
        prompt_len=20,
        max_tokens=1 << 20,
        window=Window(include_output=True),
    )

    def assemble():
        assembly = Assembly(spec)
        ids = np.arange(30)
        assembly.accept(Rows(0, 0, ids[:20], slice(0, 37), np.zeros((20, 37, 8), np.uint8)))
        for step in range(1, 10):
            part = slice(19 + step, 20 + step)
            assembly.accept(Rows(step, part.start, ids[part], slice(0, 37), np.zeros((1, 37, 8), np.uint8)))
        assert assembly.complete(ids) == range(29)

    assert peak_bytes(assemble, enough=1 << 20) < 1 << 20
