"""Which row of a step's batch goes to which cell of the arena. Built on the CPU before the forward; numpy only.

A token that is captured has a destination cell and a plan; the plan (a row of a small table) says for each tap of this worker the
rank of its layer among the layers that the request asked for, or -1. So the arena is packed by what was asked, and cell
`destination + rank` holds the row of that layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layertap.engines.ranges import numbers

SKIP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What one request wants of this worker.

    Attributes:
        candidates: absolute positions that may be owed.
        ranks: for each tap of this worker, the rank of its layer among the request's layers that this worker holds, or SKIP.
        num_layers: how many of the request's layers this worker holds.
    """

    candidates: range
    ranks: tuple[int, ...]
    num_layers: int


class Chunk(NamedTuple):  # a step makes hundreds
    """Consecutive rows of one request in a batch: tokens first .. stop - 1 of the batch, cells from `cell` of the step's span."""

    request_id: str
    first: int
    stop: int
    cell: int
    num_layers: int
    plan: int


class PlanTable:
    """The rank table: one row per distinct `ranks`. Rows that no request of a step uses may be taken over."""

    def __init__(self, num_rows: int, num_taps: int) -> None:
        self.table: NDArray[np.int32] = np.full((num_rows, max(num_taps, 1)), SKIP, np.int32)
        self._rows: dict[tuple[int, ...], int] = {}
        self.changed = True

    def rows_for(self, wanted: Sequence[tuple[int, ...]]) -> list[int]:
        """The table rows of `wanted`, which are all needed in the same step."""
        distinct = set(wanted)
        if len(distinct) > len(self.table):
            raise ValueError(
                f"{len(distinct)} different sets of layers in one step, the table has {len(self.table)} rows"
            )
        for ranks in distinct:
            if ranks in self._rows:
                continue
            row = len(self._rows)
            if row == len(self.table):
                victim = next(known for known in self._rows if known not in distinct)
                row = self._rows.pop(victim)
            self._rows[ranks] = row
            self.table[row] = ranks
            self.changed = True
        return [self._rows[ranks] for ranks in wanted]


def wanted_rows(start: int, count: int, slack: int, candidates: range) -> tuple[int, int]:
    """Which of `count` rows (half-open) may be wanted, if row 0 is at an absolute position from start - slack to start."""
    first = max(0, candidates.start - start)
    stop = min(count, candidates.stop - start + slack)
    return (first, stop) if candidates and first < stop else (0, 0)


def lay_out(
    request_ids: Sequence[str],
    query_starts: Sequence[int] | NDArray[np.integer],
    computed: Sequence[int] | NDArray[np.integer],
    wants: Mapping[str, Want],
    plans: PlanTable,
    slack: int = 0,
) -> tuple[list[Chunk], int]:
    """Lay out one step.

    Args:
        request_ids: the batch's requests in row order.
        query_starts: row of the first token of each request, and the total at the end.
        computed: tokens computed before this step; an upper bound where drafts were counted as accepted.
        wants: what is captured.
        plans: the rank table.
        slack: how far `computed` may be too high.

    Returns:
        The chunks and the number of cells they take.
    """
    found = list(_wanted(request_ids, np.asarray(query_starts).tolist(), np.asarray(computed).tolist(), wants, slack))
    rows = plans.rows_for([want.ranks for _, _, _, want in found])
    chunks, cell = [], 0
    for (request_id, first, stop, want), plan in zip(found, rows, strict=True):
        chunks.append(Chunk(request_id, first, stop, cell, want.num_layers, plan))
        cell += (stop - first) * want.num_layers
    return chunks, cell


def _wanted(
    request_ids: Sequence[str], starts: list[int], computed: list[int], wants: Mapping[str, Want], slack: int
) -> Iterator[tuple[str, int, int, Want]]:
    for i, request_id in enumerate(request_ids):
        want = wants.get(request_id)
        if want is None or not want.num_layers:
            continue
        begin = starts[i]
        first, stop = wanted_rows(computed[i], starts[i + 1] - begin, slack, want.candidates)
        if first < stop:
            yield request_id, begin + first, begin + stop, want


def fill(
    destinations: NDArray[np.int32], plans: NDArray[np.int32], chunks: Sequence[Chunk], first_cell: int, num_rows: int
) -> None:
    """Write the map of a step into `destinations[:num_rows]` and `plans[:num_rows]`; rows that aren't captured are skipped."""
    destinations[:num_rows] = SKIP
    if not chunks:
        return
    table = np.array(
        [(chunk.first, chunk.stop - chunk.first, chunk.cell, chunk.num_layers, chunk.plan) for chunk in chunks]
    )
    firsts, counts, cells, layers, rows = table.T
    tokens = numbers(firsts, counts)
    within = tokens - np.repeat(firsts, counts)
    destinations[tokens] = first_cell + np.repeat(cells, counts) + within * np.repeat(layers, counts)
    plans[tokens] = np.repeat(rows, counts)
