"""Files that hold the rows of many samples end to end.

A shard is an ordinary layertap file (docs/format.md) of the rows of its samples, one sample after the other. Rows go to
the temporary file as they come; in memory are only 16 bytes a row (token id and digest) until it is published.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from layertap.capture.spans import Spans
from layertap.datasets.mapping import map_private, will_need
from layertap.errors import CorruptError, ForeignError, MissingError, TornError
from layertap.files import format as fmt
from layertap.files.publish import PendingFile

if TYPE_CHECKING:
    from layertap.files.blocks import BlockRows


_IDS = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a sample came to be, and the checksum over its row digests (and so over its token ids)."""

    row: int
    num_rows: int
    checksum: str


@dataclass(frozen=True, slots=True)
class _Appended:
    """What one sample added to the shard."""

    end: int
    """One past its last row."""
    end_byte: int
    """One past its last byte, from where rows begin."""
    blocks: NDArray[np.int64]
    """[blocks, 2]: one past the last row and byte of each; none where rows aren't compressed."""


class ShardWriter:
    """One open shard.

    Args:
        path: the target, absolute.
        info: what the rows are; counts are ignored.
        max_rows: the most rows that it can take.
        fsync: sync before the file gets its name.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: Path, info: fmt.FileInfo, *, max_rows: int, fsync: bool, overwrite: bool = False) -> None:
        self.path = path
        self.max_rows = max_rows
        self.compress_seconds = 0.0
        """Of all cores together."""
        self._info = info
        self._row_bytes = info.row_bytes
        # one list, so that an interrupt can't leave half of a sample in it
        self._samples: list[_Appended] = []
        self._token_ids = np.empty(max_rows, np.int64)
        self._digests = np.empty(max_rows, np.uint64)
        self._pending = PendingFile(path, info, max_rows, overwrite=overwrite, lock=False, fsync=fsync)
        self._reserve = fmt.header_reserve(info, max_rows)
        self._pool = ThreadPoolExecutor(_compressors()) if info.packed is not None else None
        try:
            # the header is written last; that there is room for it has to be sure before any row is
            with self._pending.temporary.open("r+b") as file:
                file.write(b" " * self._reserve)
        except BaseException:
            self.discard()
            raise

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self._samples[-1].end if self._samples else 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows so far take in the file."""
        return self._samples[-1].end_byte if self._samples else 0

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return len(self._samples)

    def append(self, rows: NDArray[np.uint8], token_ids: NDArray[np.int64], before: Spans = ()) -> Placed:
        """Write a sample behind the others.

        Args:
            rows: uint8 [n, bytes of a row], C-contiguous.
            token_ids: int64 [n].
            before: rows of the shard that are the sample's first ones.

        Raises:
            OSError: the disk's reason; the samples before stay as they were.
        """
        if rows.shape != (len(token_ids), self._row_bytes):
            raise ValueError(f"rows of shape {rows.shape} for {len(token_ids)} tokens of {self._row_bytes} bytes")
        first = self.num_rows
        end = first + len(token_ids)
        if end > self.max_rows:
            raise ValueError(f"{first} + {len(token_ids)} rows in a shard of at most {self.max_rows}")
        self._digests[first:end] = fmt.row_digests(rows, token_ids)
        self._token_ids[first:end] = token_ids
        if self._pool is None:
            num_layers = len(self._info.layers)
            self._pending.write(first, 0, rows.reshape(len(rows), num_layers, self._row_bytes // num_layers))
            self._samples.append(_Appended(end, end * self._row_bytes, np.empty((0, 2), np.int64)))
        else:
            self._samples.append(self._append_compressed(self._pool, rows, first))
        digests = np.concatenate([self._digests[begin:stop] for begin, stop in (*before, (first, end))])
        return Placed(first, len(token_ids), sample_checksum(digests))

    def _append_compressed(self, pool: ThreadPoolExecutor, rows: NDArray[np.uint8], first: int) -> _Appended:
        from layertap.files.blocks import compress, rows_of_block

        def timed(part: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], float]:
            started = time.thread_time()
            return compress(part, self._info), time.thread_time() - started

        step = rows_of_block(self._info)
        parts = [rows[begin : begin + step] for begin in range(0, len(rows), step)]
        ends: list[tuple[int, int]] = []
        row, byte = first, self.num_bytes
        for part, (block, seconds) in zip(parts, pool.map(timed, parts), strict=True):
            self._pending.write_packed(block, byte)
            self.compress_seconds += seconds
            row, byte = row + len(part), byte + len(block)
            ends.append((row, byte))
        return _Appended(row, byte, np.array(ends, np.int64).reshape(-1, 2))

    def drop_last(self) -> None:
        """Take the last sample back and give its space free."""
        self._samples.pop()
        os.truncate(self._pending.temporary, self._reserve + self.num_bytes)

    def publish(self) -> None:
        """Give the shard its name; may be tried again after `drop_last` when the disk was full.

        Raises:
            OSError: the disk's reason.
        """
        table = None
        if self._pool is not None:
            table = np.concatenate([np.zeros((1, 2), np.int64), *(one.blocks for one in self._samples)])
        self._pending.publish(
            first_row=0,
            token_ids=self._token_ids[: self.num_rows],
            digests=self._digests[: self.num_rows],
            first_position=0,
            num_tokens=self.num_rows,
            facts={"samples": str(self.num_samples)},
            table=table,
        )

    def discard(self) -> None:
        """Drop everything; does nothing after `publish`."""
        self._pending.discard()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _compressors() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def sample_checksum(digests: NDArray[np.uint64]) -> str:
    """Digest the row digests of one sample."""
    return str(xxhash.xxh3_128_hexdigest(digests.astype("<u8").tobytes()))


class MappedShard:
    """A published shard (or single file), mapped into memory.

    The mapping is private and writable: tensors over it share no memory with the file once they are written to, and
    nothing is copied until then. Opening reads 8 bytes of the file: shapes are known from the manifest. Where rows are compressed,
    it also reads the table of blocks, and rows are decompressed to memory of their own.

    Args:
        path: the file.
        info: what the data set's files are.
        min_rows: the index names so many.

    Raises:
        MissingError: the file isn't there.
        TornError: the file has another length than its rows take.
        ForeignError: the file isn't a shard.
        CorruptError: its table of blocks is damaged.
    """

    def __init__(self, path: Path, info: fmt.FileInfo, min_rows: int) -> None:
        self.path = path
        self._row_bytes = info.row_bytes
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._offset = 8 + fmt.header_size(file.read(8), size, str(path))
                self._bytes = map_private(file.fileno(), size)
        except FileNotFoundError:
            raise MissingError(f"{path}: the index names this file, but it isn't there") from None
        except IsADirectoryError:
            raise ForeignError(f"{path}: expected a file of rows, found a folder") from None
        self._blocks: BlockRows | None = None
        if info.packed is None:
            self.num_rows, rest = divmod(size - self._offset, info.row_bytes + 8)
            stored_bytes = self.num_rows * info.row_bytes
        else:
            self.num_rows, stored_bytes, rest = self._find_blocks(info)
        if rest or self.num_rows < min_rows:
            raise TornError(
                f"{path}: {size} bytes, which is no whole number of rows or fewer than the {min_rows} that the index has"
            )
        self._ids_offset = self._offset + stored_bytes

    def _find_blocks(self, info: fmt.FileInfo) -> tuple[int, int, int]:
        """The table ends with the number of rows and their bytes, so it can be found from the end of the file."""
        from layertap.files.blocks import BlockRows

        data = self._bytes[self._offset :]
        num_rows, end = data[-16:].copy().view("<i8").tolist() if len(data) >= 16 else (-1, -1)
        stored_bytes = -(-end // 8) * 8
        left = len(data) - stored_bytes - 8 * num_rows
        if min(num_rows, end) < 0 or left < 16 or left % 16:
            return num_rows, stored_bytes, 1
        table = data[-left:].copy().view("<i8").reshape(-1, 2)
        if table[0].any():
            return num_rows, stored_bytes, 1
        self._blocks = BlockRows(info, data[:stored_bytes], table, str(self.path))
        return num_rows, stored_bytes, 0

    def rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return uint8 [count, bytes of a row], a view of the mapping where rows aren't compressed."""
        if self._blocks is not None:
            return self._blocks.read(first, count)
        start = self._offset + first * self._row_bytes
        return self._bytes[start : start + count * self._row_bytes].reshape(count, self._row_bytes)

    def will_need(self, spans: Spans) -> None:
        """Let the kernel begin to read these rows, and nothing around them."""
        for begin, end in spans:
            if self._blocks is not None:
                will_need(self._blocks.stored(begin, end))
            else:
                will_need(self._bytes[self._offset + begin * self._row_bytes : self._offset + end * self._row_bytes])

    def token_ids(self, first: int, count: int) -> NDArray[np.int64]:
        """Return int64 [count]; a view where the file's alignment allows it, which it does for usual sizes."""
        start = self._ids_offset + 8 * first
        ids = self._bytes[start : start + 8 * count]
        return ids.view(_IDS) if start % 8 == 0 else ids.copy().view(_IDS)

    def read(self, spans: Spans, checksum: str | None = None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return rows and token ids of a sample that lies in these rows; a copy, where it lies in several pieces.

        Args:
            spans: half-open.
            checksum: compare with this one.

        Raises:
            CorruptError: rows or token ids differ from what was written, or the index names rows that aren't there.
        """
        parts = []
        for begin, end in spans:
            if not 0 <= begin <= end <= self.num_rows:
                raise CorruptError(f"{self.path}: the index names rows {list(spans)} of {self.num_rows}")
            parts.append((self.rows(begin, end - begin), self.token_ids(begin, end - begin)))
        rows, token_ids = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        if checksum is not None and (
            (token_ids < 0).any() or sample_checksum(fmt.row_digests(rows, token_ids)) != checksum
        ):
            raise CorruptError(f"{self.path}: rows {list(spans)} don't match the checksum of the index")
        return rows, token_ids
