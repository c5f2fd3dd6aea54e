"""Single rows of batched generation, gathered by request before they go to its capture."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from layertap.assembly import Rows
from layertap.engines.bank import Bank, Gathered

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Gathering"]

_LIMIT_BYTES = 512 * 2**20


class Gathering:
    """Rows of running requests that are not with their captures yet.

    Args:
        num_requests: how many run at once.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._banks: dict[tuple[int, int], Bank] = {}

    def through(self, step: Sequence[tuple[str, Rows]]) -> Iterator[tuple[str, Rows]]:
        """Take a step's rows; yield what is to go on now, of each request in its order."""
        singles: dict[tuple[int, int], list[tuple[str, Rows]]] = {}
        for key, rows in step:
            if len(rows.input_ids) == 1:
                singles.setdefault((rows.data.shape[1], rows.data.shape[2]), []).append((key, rows))
            else:
                yield from self.rest(key)
                yield key, rows
        for kind, group in singles.items():
            yield from self._gather(kind, group)

    def rest(self, key: str) -> Iterator[tuple[str, Rows]]:
        """What is there of a request, which is then forgotten."""
        for bank in self._banks.values():
            gathered = bank.take(key)
            bank.drop(key)
            if gathered is not None:
                yield key, _rows(gathered)

    def _gather(self, kind: tuple[int, int], group: list[tuple[str, Rows]]) -> Iterator[tuple[str, Rows]]:
        num_layers, cell_bytes = kind
        if kind not in self._banks:
            self._banks[kind] = Bank(self._num_requests, num_layers, cell_bytes, _LIMIT_BYTES)
        cells: NDArray[np.uint8] = np.concatenate([rows.data[0] for _, rows in group])
        for gathered in self._banks[kind].add(
            group[0][1].step,
            [key for key, _ in group],
            np.arange(len(group)) * num_layers,
            np.fromiter((rows.start for _, rows in group), np.int64, len(group)),
            np.fromiter((int(rows.input_ids[0]) for _, rows in group), np.int64, len(group)),
            cells,
        ):
            yield gathered.request_id, _rows(gathered)


def _rows(gathered: Gathered) -> Rows:
    slots = slice(0, gathered.data.shape[1])
    return Rows(gathered.step, gathered.start, gathered.input_ids, slots, gathered.data, gathered.release)
