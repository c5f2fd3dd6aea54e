"""Rows to complete samples, merged by absolute position: the one rule behind every engine.

An engine hands over chunks of rows in any order: chunked prefill, replays after a preemption, draft tokens that were
rejected later, pipeline stages with some of the layers each, an extra step of an asynchronous scheduler. Each row says its
position, its layer slots, the step that computed it and the token id that was fed. Among repeats of a (position, slot) the
highest step wins. A sample is complete when every owed (position, slot) is there; each row's id must equal the final
token at its position, which catches swapped, shifted and stale draft rows. A hole is an error, never a zero.

No I/O, no threads, no torch: `Assembly` only decides which bytes go to which row. Callers serialize their calls.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layertap.capture.request import CaptureSpec
from layertap.errors import EngineError

__all__ = ["Assembly", "Piece", "Rows"]

_LEAST_ROWS = 64


@dataclass(slots=True)
class Rows:
    """One chunk of one sequence, as an engine's tap hands it over.

    Attributes:
        step: engine step, monotone; among repeats of a position the highest wins.
        start: absolute position of the first row; the rows are start .. start + n - 1.
        input_ids: int64 [n], the ids that were fed at these positions.
        slots: which layer slots of the capture `data` holds.
        data: uint8 [n, num_slots, hidden_size * itemsize], C-contiguous, a view of the engine's buffer.
        release: called exactly once, from any thread, when `data` isn't needed any more.
        digests: uint64 [n], the rows' digests (`layertap.files.format.row_digests`) where the engine has them already; only
            with all slots.
        all_finite: the engine has looked at every value: none is infinite or NaN. If false, nobody has looked.
        is_bounded: `data` lies in memory that the engine holds in any case and doesn't let grow, so that nobody has to wait for
            the byte budget until `release` gives it back.
    """

    step: int
    start: int
    input_ids: NDArray[np.int64]
    slots: slice
    data: NDArray[np.uint8]
    release: Callable[[], None] | None = None
    digests: NDArray[np.uint64] | None = None
    all_finite: bool = False
    is_bounded: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to store: `data[i]` goes to file row `row + i`, layer slots `first_slot` on."""

    row: int
    first_slot: int
    data: NDArray[np.uint8]

    def blocks(self, most_bytes: int) -> "Iterator[Piece]":
        """The same in blocks of whole rows of at most so many bytes, but of one row at least."""
        count = len(self.data)
        size = max(1, most_bytes * count // self.data.nbytes) if self.data.nbytes else count
        if size >= count:
            yield self
            return
        for begin in range(0, count, size):
            yield Piece(self.row + begin, self.first_slot, self.data[begin : begin + size])


class Assembly:
    """The state of one sample: which (position, slot) is there, from which step, with which input id.

    Rows are addressed by `position - base`, where base is the first position that may be owed.
    """

    def __init__(self, spec: CaptureSpec) -> None:
        self.spec = spec
        self._candidates = spec.candidates
        self.base = self._candidates.start
        # grows with the rows: a request that may generate 100,000 tokens and ends after ten must not cost memory for all
        self._ids = np.zeros(0, np.int64)
        self._id_steps = np.zeros(0, np.int64)
        self._steps = np.zeros((0, len(spec.layers)), np.int64)
        self.replayed_rows = 0

    def accept(self, rows: Rows) -> list[Piece]:
        """Take a chunk; return the pieces of it that are to be stored.

        Raises:
            EngineError: shapes that don't fit the capture.
        """
        spec = self.spec
        num_rows = len(rows.input_ids)
        first, stop, stride = rows.slots.indices(len(spec.layers))
        if stride != 1 or rows.data.dtype != np.uint8 or rows.data.shape != (num_rows, stop - first, spec.slot_bytes):
            raise EngineError(
                f"rows at position {rows.start} have shape {rows.data.shape} {rows.data.dtype}, expected "
                f"{(num_rows, stop - first, spec.slot_bytes)} uint8 for slots {rows.slots} of {len(spec.layers)} layers"
            )
        begin = max(rows.start, self._candidates.start)
        end = min(rows.start + num_rows, self._candidates.stop)
        if begin >= end:
            return []
        source = slice(begin - rows.start, end - rows.start)
        target = slice(begin - self.base, end - self.base)
        self._grow(target.stop)
        stored_steps = self._steps[target, first:stop]
        if not (stored_steps >= 0).any():  # the common case: nothing of it was seen before
            stored_steps[:] = rows.step
            if stop - first == len(spec.layers):
                self._ids[target], self._id_steps[target] = rows.input_ids[source], rows.step
            else:  # another stage may have brought other layers of a later step
                self._note_ids(target, rows.input_ids[source], rows.step)
            return [Piece(target.start, first, rows.data[source])]
        self.replayed_rows += int((stored_steps >= 0).any(axis=1).sum())
        newer = rows.step >= stored_steps
        self._note_ids(target, rows.input_ids[source], rows.step)
        pieces = [
            Piece(target.start + run.start, first + slot_run.start, rows.data[source][run, slot_run])
            for slot_run, columns in _equal_column_runs(newer)
            for run in _true_runs(columns)
        ]
        stored_steps[newer] = rows.step
        return pieces

    def _grow(self, num_rows: int) -> None:
        have = len(self._ids)
        if num_rows <= have:
            return
        more = min(max(num_rows, 2 * have, _LEAST_ROWS), len(self._candidates)) - have
        ids, id_steps = np.zeros(more, np.int64), np.full(more, -1, np.int64)
        steps = np.full((more, self._steps.shape[1]), -1, np.int64)
        if have:
            ids, id_steps = np.concatenate([self._ids, ids]), np.concatenate([self._id_steps, id_steps])
            steps = np.concatenate([self._steps, steps])
        self._ids, self._id_steps, self._steps = ids, id_steps, steps

    def _note_ids(self, target: slice, ids: NDArray[np.int64], step: int) -> None:
        newer = step >= self._id_steps[target]
        self._ids[target][newer] = ids[newer]
        self._id_steps[target][newer] = step

    def complete(self, token_ids: Sequence[int] | NDArray[np.int64]) -> range:
        """Check that all that is owed is there; return the owed positions.

        Args:
            token_ids: the final tokens, prompt and output.

        Raises:
            EngineError: a hole, or a row whose input id isn't the final token.
            OptionError: an explicit span reaches past what was generated.
        """
        spec = self.spec
        owed = spec.window.owed(spec.prompt_len, len(token_ids))
        rows = slice(owed.start - self.base, owed.stop - self.base)
        if owed.stop > self._candidates.stop:
            raise EngineError(
                f"{len(token_ids)} tokens are more than the {spec.prompt_len} + {spec.max_tokens} that were announced"
            )
        self._grow(rows.stop)
        steps = self._steps[rows]
        if (steps < 0).any():
            row, slot = (int(i) for i in np.argwhere(steps < 0)[0])
            missing = int((steps < 0).sum())
            raise EngineError(
                f"{missing} of {steps.size} owed rows never arrived; the first hole is position {owed.start + row}, "
                f"layer {spec.layers[slot]}"
            )
        final = np.asarray(token_ids, np.int64)[owed.start : owed.stop]
        wrong = np.flatnonzero((self._ids[rows] != final) | (steps != self._id_steps[rows, None]).any(axis=1))
        if wrong.size:
            row = int(wrong[0])
            raise EngineError(
                f"{wrong.size} rows are of other tokens than the sequence's; first at position {owed.start + row}: computed "
                f"for token {int(self._ids[rows][row])}, the sequence has {int(final[row])}"
            )
        return owed


def _true_runs(flags: NDArray[np.bool_]) -> Iterator[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(begin), int(end))


def _equal_column_runs(flags: NDArray[np.bool_]) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
    """Group neighbouring columns that are alike, so that whole rows stay one piece."""
    changes = np.flatnonzero((flags[:, 1:] != flags[:, :-1]).any(axis=0)) + 1
    bounds = [0, *(int(c) for c in changes), flags.shape[1]]
    for begin, end in itertools.pairwise(bounds):
        yield slice(begin, end), flags[:, begin]
