"""Rows in compressed blocks, lossless: the bytes of the values put into planes, then zstd (docs/format.md, version 3).

The first byte of floating-point values (sign and exponent) says little, the last is noise. Each on its own, layer by layer, the
first one shrinks. A block is about a megabyte of whole rows, so any row can be
read without those of other blocks.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from layertap.capture.request import SAVE_DTYPES
from layertap.errors import CorruptError
from layertap.files.format import FileInfo

_BLOCK_BYTES = 1 << 20
_LEVEL = 1  # higher ones cost much and gain nothing on mantissas
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def rows_of_block(info: FileInfo) -> int:
    """How many rows a block of this file takes at most."""
    return max(1, _BLOCK_BYTES // info.row_bytes)


def compress(rows: NDArray[np.uint8], info: FileInfo) -> NDArray[np.uint8]:
    """Compress rows [n, bytes of a row] to one block."""
    size = SAVE_DTYPES[info.dtype]
    values = rows.reshape(len(rows), len(info.layers), -1).view(_UNSIGNED[size]).transpose(1, 0, 2)
    planes = np.empty((len(info.layers), size, len(rows), values.shape[2]), np.uint8)
    for number in range(size):
        # casting keeps the lowest byte
        np.copyto(planes[:, number], values >> values.dtype.type(8 * number), casting="unsafe")
    return np.frombuffer(pa.Codec("zstd", compression_level=_LEVEL).compress(planes.reshape(-1)), np.uint8)


def _decompress(block: NDArray[np.uint8], out: NDArray[np.uint8], info: FileInfo) -> None:
    """The rows of a block, into `out` [n, bytes of a row].

    Raises:
        OSError: not what was compressed.
    """
    size = SAVE_DTYPES[info.dtype]
    raw = pa.Codec("zstd").decompress(pa.py_buffer(block), decompressed_size=out.nbytes)
    if raw.size != out.nbytes:
        raise OSError(f"{raw.size} bytes instead of {out.nbytes}")
    planes = np.frombuffer(raw, np.uint8).reshape(len(info.layers), size, len(out), -1)
    values = out.reshape(len(out), len(info.layers), -1).view(_UNSIGNED[size]).transpose(1, 0, 2)
    np.copyto(values, planes[:, 0])
    for number in range(1, size):
        values |= planes[:, number].astype(values.dtype) << values.dtype.type(8 * number)


class BlockRows:
    """Random access to the rows of a file of compressed blocks.

    Args:
        info: what the file holds.
        stored: its compressed bytes.
        table: int64 [blocks + 1, 2]: the first row and the first byte of each block, and what would be those of the next.
        name: the file's, for messages.
    """

    def __init__(self, info: FileInfo, stored: NDArray[np.uint8], table: NDArray[np.int64], name: str) -> None:
        self._info = info
        self._stored = stored
        self._table = table
        self._name = name
        sizes = np.diff(table, axis=0)
        sane = bool((sizes > 0).all() and (sizes[:, 0] <= rows_of_block(info)).all()) and not table[0].any()
        if not sane or table[-1, 1] > len(stored) or stored[table[-1, 1] :].any():
            raise CorruptError(f"{name}: its table of blocks is damaged")

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return int(self._table[-1, 0])

    def stored(self, begin: int, end: int) -> NDArray[np.uint8]:
        """The compressed bytes of the blocks that hold some rows."""
        first = max(0, int(np.searchsorted(self._table[:, 0], begin, "right")) - 1)
        last = int(np.searchsorted(self._table[:, 0], end, "left"))
        return self._stored[self._table[first, 1] : self._table[min(last, len(self._table) - 1), 1]]

    def read(self, first: int, count: int) -> NDArray[np.uint8]:
        """Decompress rows: uint8 [count, bytes of a row].

        Raises:
            CorruptError: a block is damaged so that it can't be decompressed; digests find all other damage.
        """
        out = np.empty((count, self._info.row_bytes), np.uint8)
        done, block = 0, int(np.searchsorted(self._table[:, 0], first, "right")) - 1
        while done < count:
            (begin, start), (end, stop) = self._table[block : block + 2].tolist()
            skipped = first + done - begin
            taken = min(end - begin - skipped, count - done)
            whole = taken == end - begin
            rows = out[done : done + taken] if whole else np.empty((end - begin, out.shape[1]), np.uint8)
            try:
                _decompress(self._stored[start:stop], rows, self._info)
            except (OSError, pa.ArrowException) as exc:
                raise CorruptError(f"{self._name}: rows {begin} to {end - 1} can't be decompressed: {exc}") from exc
            if not whole:
                out[done : done + taken] = rows[skipped : skipped + taken]
            done, block = done + taken, block + 1
        return out
