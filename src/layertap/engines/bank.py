"""Rows of generated tokens, gathered until there are enough of one request.

Generation gives one row a step and request. Handing each to the corridor by itself would cost more of the interpreter's time than
an engine's loop has to spare; so a step's single rows are copied into a buffer by one indexed copy, and a request's rows go on
together: when its part is full, when a row isn't the next one, or when it ends.

The copy is NumPy's, which moves whole rows; torch's `index_copy_` goes byte by byte and took thirty times as long.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_BYTES, LEAST_ROWS, MAX_ROWS = 1 << 19, 8, 128
"""Of one request's part: enough to make a write worth its call, little enough that the end of many requests is soon written."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Consecutive rows of one request, from several steps.

    Attributes:
        request_id: whose.
        step: the last step among them.
        start: position of the first row.
        input_ids: int64 [n].
        data: uint8 [n, layers, bytes of a row].
        release: to be called once, from any thread, when `data` isn't needed any more; None where it is a copy.
    """

    request_id: str
    step: int
    start: int
    input_ids: NDArray[np.int64]
    data: NDArray[np.uint8]
    release: Callable[[], None] | None


class Bank:
    """A buffer of `num_slots` requests with the same number of layers.

    Rows that go on stay where they are until they are written, and their request gets a spare place; they are copied only where
    none is free.

    Args:
        num_slots: requests at most.
        num_layers: layers of each row.
        cell_bytes: bytes of one row of one layer.
        limit_bytes: of the buffer; fewer rows are gathered where it is short.
    """

    def __init__(self, num_slots: int, num_layers: int, cell_bytes: int, limit_bytes: int) -> None:
        row_bytes = num_layers * cell_bytes
        worth = min(MAX_ROWS, max(LEAST_ROWS, MAX_BYTES // max(1, row_bytes)))
        self._num_requests = num_slots
        num_slots += num_slots // 2
        self.rows = max(1, min(worth, limit_bytes // max(1, num_slots * row_bytes)))
        self._num_layers = num_layers
        # touched only as far as it is used
        self._data: NDArray[np.uint8] = np.empty((num_slots, self.rows, num_layers, cell_bytes), np.uint8)
        self._slots: dict[str, int] = {}
        self._names: list[str] = [""] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._count = np.zeros(num_slots, np.int64)
        self._start = np.zeros(num_slots, np.int64)
        self._step = np.zeros(num_slots, np.int64)
        self._ids = np.zeros((num_slots, self.rows), np.int64)

    def has_room(self, request_ids: Sequence[str]) -> bool:
        """Whether these requests, of which some may be known, all find a slot."""
        missing = sum(request_id not in self._slots for request_id in request_ids)
        return missing + len(self._slots) <= self._num_requests

    def add(
        self,
        step: int,
        request_ids: Sequence[str],
        first_cells: NDArray[np.int64],
        positions: NDArray[np.int64],
        input_ids: NDArray[np.int64],
        cells: NDArray[np.uint8],
    ) -> list[Gathered]:
        """Take one row of each request; return what is to go on because it was interrupted or is full.

        Args:
            step: the engine's step.
            request_ids: distinct.
            first_cells: of each request's row in `cells`.
            positions: absolute.
            input_ids: fed at these positions.
            cells: uint8 [cells, bytes] of the step.
        """
        slots = self._slots_of(request_ids)
        interrupted = (self._count[slots] > 0) & (positions != self._start[slots] + self._count[slots])
        out = [self._take(int(slot)) for slot in slots[interrupted]]
        if out:
            slots = self._slots_of(request_ids)
        fresh = self._count[slots] == 0
        self._start[slots[fresh]] = positions[fresh]
        filled = self._count[slots]
        self._ids[slots, filled] = input_ids
        self._data[slots, filled] = self._rows_of(first_cells, cells)
        self._count[slots] += 1
        self._step[slots] = step
        out += [self._take(int(slot)) for slot in slots[self._count[slots] == self.rows]]
        return out

    def take(self, request_id: str) -> Gathered | None:
        """What is there of a request."""
        slot = self._slots.get(request_id)
        return None if slot is None or not self._count[slot] else self._take(slot)

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._count[slot] = 0
            self._free.append(slot)

    def _rows_of(self, first_cells: NDArray[np.int64], cells: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rows [n, layers, bytes] that begin at these cells; a view where they stand one after the other."""
        count, width = len(first_cells), self._num_layers
        first = int(first_cells[0]) if count else 0
        if np.array_equal(first_cells, first + np.arange(count) * width):
            return cells[first : first + count * width].reshape(count, width, -1)
        found: NDArray[np.uint8] = cells[first_cells[:, None] + np.arange(width)]
        return found

    def _slots_of(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        return np.fromiter((self._slot(request_id) for request_id in request_ids), np.int64, len(request_ids))

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = self._free.pop()
            self._names[slot] = request_id
        return slot

    def _take(self, slot: int) -> Gathered:
        count, self._count[slot] = int(self._count[slot]), 0
        name, data = self._names[slot], self._data[slot, :count]
        release: Callable[[], None] | None = None
        if len(self._free) > self._num_requests - len(self._slots):  # the others are for requests that come
            self._slots[name] = other = self._free.pop()
            self._names[other] = name
            release = functools.partial(self._free.append, slot)
        else:
            data = data.copy()
        return Gathered(
            name, int(self._step[slot]), int(self._start[slot]), self._ids[slot, :count].copy(), data, release
        )
