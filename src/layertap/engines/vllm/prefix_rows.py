"""The rows of cached blocks on the host, one slot per block and layer; filled and read as the scheduler's process says.

Used by one thread, which takes rows and orders in the order of the steps: what is asked for was filled before, unless rows were
lost.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from layertap.engines.vllm.messages import Fill, Reuse

_PIECE_BYTES = 8 << 20
_BESIDE_BYTES = 9  # the token that was fed, and whether the row is there


def slot_bytes(block_size: int, cell_bytes: int) -> int:
    """Memory of a slot: the rows of one block in one layer."""
    return block_size * (cell_bytes + _BESIDE_BYTES)


class PrefixRows:
    """See the module.

    Args:
        num_slots: slots at most.
        block_size: rows of a slot.
        cell_bytes: one row of one layer.
    """

    def __init__(self, num_slots: int, block_size: int, cell_bytes: int) -> None:
        self.block_size = block_size
        # memory is touched only as slots are used
        self._data: NDArray[np.uint8] = np.empty((num_slots, block_size, cell_bytes), np.uint8)
        self._ids: NDArray[np.int64] = np.empty((num_slots, block_size), np.int64)
        self._there: NDArray[np.bool_] = np.zeros((num_slots, block_size), np.bool_)
        self._owners: dict[int, Fill] = {}
        self._open: dict[str, dict[int, tuple[Fill, tuple[tuple[int, int], ...]]]] = {}

    def begin(self, fill: Fill, held: Sequence[int]) -> None:
        """Expect the rows of a block.

        Args:
            fill: which.
            held: layers of the request that this worker holds, in the order of its rows.
        """
        columns = tuple((held.index(layer), slot) for layer, slot in fill.slots if layer in held)
        for _, slot in columns:
            self._owners[slot] = fill
            self._there[slot] = False
        if columns:
            self._open.setdefault(fill.request_id, {})[fill.start] = (fill, columns)

    def expects(self, request_id: str) -> bool:
        """Whether rows of the request are to be kept."""
        return request_id in self._open

    def put(self, request_id: str, start: int, input_ids: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """Keep what is expected of a request's rows: `data` [n, layers, bytes] from position `start` on."""
        blocks = self._open.get(request_id)
        if blocks is None:
            return
        size, stop = self.block_size, start + len(input_ids)
        for block_start in [first for first in blocks if first < stop and first + size > start]:
            fill, columns = blocks[block_start]
            begin, end = max(start, block_start), min(stop, block_start + size)
            source, target = slice(begin - start, end - start), slice(begin - block_start, end - block_start)
            for column, slot in columns:
                if self._owners[slot] is fill:  # else the slot was given to another block
                    self._data[slot, target] = data[source, column]
                    self._ids[slot, target] = input_ids[source]
                    self._there[slot, target] = True
            if end == block_start + size:
                del blocks[block_start]
        if not blocks:
            del self._open[request_id]

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._open.pop(request_id, None)

    def take(self, reuse: Reuse, columns: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]:
        """Copies of rows, in pieces: their first position, the tokens that were fed, the rows [n, layers, bytes].

        Args:
            reuse: which.
            columns: the request's layers that this worker holds, as places in its order.

        Raises:
            LookupError: rows aren't there.
        """
        size = self.block_size
        first_block = reuse.start // size
        slots = np.array(reuse.slots, np.int64)[:, list(columns)]
        positions = np.arange(reuse.start, reuse.stop)
        blocks, rows = positions // size - first_block, positions % size
        if slots.size and not self._there[slots[blocks], rows[:, None]].all():
            raise LookupError("rows of cached blocks were lost on the way to the host")
        per_piece = max(1, _PIECE_BYTES // max(1, len(columns) * self._data.shape[2]))
        for begin in range(0, len(positions) if columns else 0, per_piece):
            part = slice(begin, begin + per_piece)
            where = slots[blocks[part]], rows[part, None]
            yield int(positions[begin]), self._ids[where][:, 0], self._data[where]
