"""Files that hold the rows of many samples end to end.

A shard is an ordinary layertap file (docs/format.md) of the rows of its samples, one sample after the other. Rows go to
the temporary file as they come; in memory are only 16 bytes a row (token id and digest) until it is published.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from layertap.datasets.mapping import map_private
from layertap.errors import CorruptError, ForeignError, MissingError, TornError
from layertap.files import format as fmt
from layertap.files.publish import PendingFile


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a sample came to be, and the checksum over its row digests (and so over its token ids)."""

    row: int
    num_rows: int
    checksum: str


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
        self._row_bytes = info.row_bytes
        self._num_layers = len(info.layers)
        # one list, so that an interrupt can't leave half of a sample in it
        self._samples: list[tuple[int, NDArray[np.int64], NDArray[np.uint64]]] = []
        self._pending = PendingFile(path, info, max_rows, overwrite=overwrite, lock=False, fsync=fsync)
        self._reserve = fmt.header_reserve(info, max_rows)
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
        if not self._samples:
            return 0
        first, token_ids, _ = self._samples[-1]
        return first + len(token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows so far."""
        return self.num_rows * self._row_bytes

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return len(self._samples)

    def append(self, rows: NDArray[np.uint8], token_ids: NDArray[np.int64]) -> Placed:
        """Write a sample behind the others.

        Args:
            rows: uint8 [n, bytes of a row], C-contiguous.
            token_ids: int64 [n].

        Raises:
            OSError: the disk's reason; the samples before stay as they were.
        """
        if rows.shape != (len(token_ids), self._row_bytes):
            raise ValueError(f"rows of shape {rows.shape} for {len(token_ids)} tokens of {self._row_bytes} bytes")
        first = self.num_rows
        if first + len(token_ids) > self.max_rows:
            raise ValueError(f"{first} + {len(token_ids)} rows in a shard of at most {self.max_rows}")
        digests = fmt.row_digests(rows, token_ids)
        self._pending.write(first, 0, rows.reshape(len(rows), self._num_layers, -1))
        self._samples.append((first, token_ids, digests))
        return Placed(first, len(token_ids), sample_checksum(digests))

    def checksum_of_beginning(self, num_rows: int) -> str:
        """Return the checksum of the first rows of the last sample."""
        return sample_checksum(self._samples[-1][2][:num_rows])

    def drop_last(self) -> None:
        """Take the last sample back and give its space free."""
        self._samples.pop()
        os.truncate(self._pending.temporary, self._reserve + self.num_bytes)

    def publish(self) -> None:
        """Give the shard its name; may be tried again after `drop_last` when the disk was full.

        Raises:
            OSError: the disk's reason.
        """
        self._pending.publish(
            first_row=0,
            token_ids=np.concatenate([token_ids for _, token_ids, _ in self._samples]),
            digests=np.concatenate([digests for _, _, digests in self._samples]),
            first_position=0,
            num_tokens=self.num_rows,
            facts={"samples": str(self.num_samples)},
        )

    def discard(self) -> None:
        """Drop everything; does nothing after `publish`."""
        self._pending.discard()


def sample_checksum(digests: NDArray[np.uint64]) -> str:
    """Digest the row digests of one sample."""
    return str(xxhash.xxh3_128_hexdigest(digests.astype("<u8").tobytes()))


class MappedShard:
    """A published shard (or single file), mapped into memory.

    The mapping is private and writable: tensors over it share no memory with the file once they are written to, and
    nothing is copied until then. Opening reads 8 bytes of the file: shapes are known from the manifest.

    Raises:
        MissingError: the file isn't there.
        TornError: the file has another length than its rows take.
        ForeignError: the file isn't a shard.
    """

    def __init__(self, path: Path, row_bytes: int, min_rows: int) -> None:
        self.path = path
        self._row_bytes = row_bytes
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._offset = 8 + fmt.header_size(file.read(8), size, str(path))
                self._bytes = map_private(file.fileno(), size)
        except FileNotFoundError:
            raise MissingError(f"{path}: the index names this file, but it isn't there") from None
        except IsADirectoryError:
            raise ForeignError(f"{path}: expected a file of rows, found a folder") from None
        self.num_rows, rest = divmod(size - self._offset, row_bytes + 8)
        if rest or self.num_rows < min_rows:
            raise TornError(
                f"{path}: {size} bytes, which is no whole number of rows or fewer than the {min_rows} that the index has"
            )

    def rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return uint8 [count, bytes of a row], a view of the mapping."""
        start = self._offset + first * self._row_bytes
        return self._bytes[start : start + count * self._row_bytes].reshape(count, self._row_bytes)

    def token_ids(self, first: int, count: int) -> NDArray[np.int64]:
        """Return int64 [count]; a view where the file's alignment allows it, which it does for usual sizes."""
        start = self._offset + self.num_rows * self._row_bytes + 8 * first
        ids = self._bytes[start : start + 8 * count]
        return ids.view("<i8") if start % 8 == 0 else ids.copy().view("<i8")

    def check(self, first: int, count: int, checksum: str | None) -> None:
        """Compare a sample with the checksum of the index.

        Raises:
            CorruptError: rows or token ids differ from what was written.
        """
        token_ids = self.token_ids(first, count)
        if (token_ids < 0).any() or sample_checksum(fmt.row_digests(self.rows(first, count), token_ids)) != checksum:
            raise CorruptError(
                f"{self.path}: rows {first} to {first + count - 1} don't match the checksum of the index"
            )
