"""What the device finds out about the rows of a large step before they leave it: their digests, and whether they are finite.

Otherwise the writer does, which costs it as much time as writing does. It is one pass of the device over rows that it has just
written (some 1.3 TB/s on an H200), beside vLLM's own work, and it covers the copy to the host. Single rows of generation aren't
worth a launch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.engines.digests import can_digest, finish_digests, start_digests
from layertap.engines.ranges import numbers
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.side import Side
from layertap.files.format import row_digests

__all__ = ["FinishedLooks", "Looks", "start_looks", "tokens_of", "works"]

logger = logging.getLogger(__name__)

Look = tuple[NDArray[np.uint64], bool]
_LEAST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Looks:
    """What the device has found out about a step in which every request takes the same number of layers.

    Attributes:
        num_layers: of each row.
        accumulators: int64 [rows of all chunks, 9], as `digests.start_digests` gives them; there when the step's rows are.
    """

    num_layers: int
    accumulators: NDArray[np.int64]

    def of(self, chunk: Chunk, input_ids: NDArray[np.int64], row_bytes: int) -> Look | None:
        """The digests of a chunk's rows, and whether all their values are finite; None for a single row.

        Args:
            chunk: of the step.
            input_ids: of the chunk's tokens.
            row_bytes: of all layers.
        """
        if chunk.stop - chunk.first == 1:
            return None
        first = chunk.cell // self.num_layers
        found = self.accumulators[first : first + len(input_ids)]
        return finish_digests(found.view(np.uint64), input_ids, row_bytes), not found[:, -1].any()

    def finished(self, chunks: Sequence[Chunk], input_ids: NDArray[np.int64], cell_bytes: int) -> FinishedLooks:
        """Of these chunks only, for another process: a ninth of the bytes.

        Args:
            chunks: of the step.
            input_ids: of all tokens of the batch.
            cell_bytes: of a row of one layer.
        """
        row_bytes = self.num_layers * cell_bytes
        found = ((chunk.cell, self.of(chunk, input_ids[chunk.first : chunk.stop], row_bytes)) for chunk in chunks)
        return FinishedLooks({cell: look for cell, look in found if look is not None})


@dataclass(frozen=True, slots=True)
class FinishedLooks:
    """As `Looks`, by the first cell of each chunk."""

    by_cell: dict[int, Look]

    def of(self, chunk: Chunk, input_ids: NDArray[np.int64], row_bytes: int) -> Look | None:
        """As that of `Looks`."""
        return self.by_cell.get(chunk.cell)


def start_looks(cells: Tensor, chunks: Sequence[Chunk], num_layers: int, input_ids: Tensor, side: Side) -> Looks | None:
    """Launch the look at a step and its copy to the host, on the current stream; None where it isn't worth it.

    Args:
        cells: [cells, hidden] of the step, on the device.
        chunks: of the step.
        num_layers: of the rows that are looked at.
        input_ids: int64 [tokens of the batch], on the device.
        side: of the current stream.
    """
    tokens = tokens_of(chunks, num_layers, cells.shape[1] * cells.element_size())
    if tokens is None:
        return None
    if isinstance(tokens, slice):
        seeds = input_ids[tokens].clone()  # aligned, whatever the first token: Triton compiles for what isn't, too
    else:
        index = side.pinned(tokens.shape, torch.int64)
        index.numpy()[:] = tokens
        seeds = input_ids[index.to(cells.device, non_blocking=True)]
    found = start_digests(cells.view(len(seeds), num_layers, -1), seeds)
    host = side.pinned(tuple(found.shape), found.dtype)
    host.copy_(found, non_blocking=True)
    return Looks(num_layers, host.numpy())


def tokens_of(chunks: Sequence[Chunk], num_layers: int, cell_bytes: int) -> slice | NDArray[np.int64] | None:
    """The tokens of the batch that the rows of a step belong to, in the order of its cells.

    None where rows are of another number of layers, and where they are too few for a look to be worth it.
    """
    if any(chunk.num_layers != num_layers for chunk in chunks):
        return None
    firsts, stops = np.array([(chunk.first, chunk.stop) for chunk in chunks]).T
    counts = stops - firsts
    if int(counts[counts > 1].sum()) * num_layers * cell_bytes < _LEAST_BYTES:  # single rows are gathered
        return None
    if np.array_equal(firsts[1:], stops[:-1]):
        return slice(int(firsts[0]), int(stops[-1]))
    return numbers(firsts, counts)


def works(device: torch.device, num_layers: int, hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether this device's digests of such rows are those of the host. It also compiles the kernel, before there are requests."""
    try:
        return _try(device, num_layers, hidden_size, dtype)
    except Exception:
        logger.exception("layertap: %s can't compute digests; the writer computes them", device)
        return False


def _try(device: torch.device, num_layers: int, hidden_size: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for num_rows in (32, 33):  # Triton compiles for numbers that 16 divides, and for others
        rows = torch.randn(num_rows, num_layers, hidden_size, generator=generator).to(dtype)
        ids = np.arange(num_rows) * 4_999
        there = rows.to(device)
        if not can_digest(there):
            return False
        found = start_digests(there, torch.from_numpy(ids).to(device)).cpu().numpy()
        raw = rows.view(torch.uint8).reshape(num_rows, -1).numpy()
        right = finish_digests(found.view(np.uint64), ids, raw.shape[1]) == row_digests(raw, ids)
        if not right.all() or found[:, -1].any():
            logger.error("layertap: the digests that %s computes are wrong; the writer computes them", device)
            return False
    return True
