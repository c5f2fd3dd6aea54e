"""Samples in, published shards out. At any moment the folder holds complete shards and nothing that looks like one.

The order in which things get their names is the whole of crash safety here:

    rows -> temporary shard        (as they come)
    index part -> temporary file   (synced)
    shard renamed                  (synced before)
    index part renamed             <- from here on its samples count as done

A kill in between leaves temporary files, or a shard that no index part names; both are leftovers that the next run (or
`layertap clean`) removes. A full disk costs the last samples of the shard at most: they are taken back until header,
token ids and index fit into the space that this frees.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from layertap.capture.spans import Spans
from layertap.datasets.index import PART_SUFFIX, SampleEntry, encode_part, spans_of
from layertap.datasets.manifest import Manifest
from layertap.datasets.prefixes import StoredRows
from layertap.datasets.shards import ShardWriter
from layertap.errors import OptionError, StoreFullError
from layertap.files.format import FileInfo, Packed
from layertap.files.paths import temporary_path
from layertap.files.publish import sync_folder

SHARDS_FOLDER = "shards"
FILES_FOLDER = "samples"
_FULL = {errno.ENOSPC, errno.EDQUOT}
# Room for row digests is kept in a shard's header from the start (11 bytes a row), so the first shards are made for few
# rows, and each one that filled up before its time is followed by one for twice as many.
_FIRST_MAX_ROWS = 1 << 16
_MOST_ROWS = 8_000_000  # keeps the header below the 100 MB that safetensors allows
_FILES_PER_PART = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """When a shard is closed, and how hard it is pressed to the disk."""

    shard_bytes: int = 2 << 30
    shard_seconds: float = 30.0
    """Also the most work that a kill can cost."""
    fsync: bool = True

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise OptionError(f"shard_bytes (--shard-size): expected at least 1, got {self.shard_bytes}")
        if not self.shard_seconds > 0:
            raise OptionError(f"shard_seconds: expected more than 0, got {self.shard_seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished sample."""

    index: int
    source_hash: str
    sample_id: str | None = None
    rows: NDArray[np.uint8]
    """[tokens, bytes of a row]"""
    token_ids: NDArray[np.int64]
    prompt_tokens: int
    finish_reason: str
    loss_mask: Spans | None = None
    """Half-open spans of rows whose tokens are trained; None: no mask."""
    positions: Spans | None = None
    """Half-open spans of the positions of the rows; None: all, from 0."""


@dataclass(slots=True)
class Compression:
    """What compressing the shards that are closed has come to."""

    row_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    """Of all cores together."""

    def add(self, row_bytes: int, stored_bytes: int, seconds: float) -> None:
        """Count a shard."""
        self.row_bytes += row_bytes
        self.stored_bytes += stored_bytes
        self.seconds += seconds


@dataclass(slots=True)
class _Part:
    """A shard (or a span of single files) with its lines of the index."""

    path: Path
    opened: float
    shard: ShardWriter | None = None
    stored: StoredRows = field(default_factory=StoredRows)
    entries: list[SampleEntry] = field(default_factory=list)


class DatasetWriter:
    """Write the samples of one run into a data set's folder. The caller holds the folder's lock.

    Use it as a context manager: however the block ends, what is complete is published.

    Args:
        folder: the data set.
        manifest: its manifest, already written.
        options: when to close a shard.
        name: begins the names of its files; no two writers of a folder have the same.
        offer: gets each part instead of its being published: where its index lies, what it is to be called, and its lines.
            Its samples count as done once the caller has renamed it.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        options: ShardOptions | None = None,
        *,
        name: str = "w0",
        offer: Callable[[Path, Path, list[SampleEntry]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._name = name
        self._offer = offer
        self._manifest = manifest
        self._options = options or ShardOptions()
        self._clock = clock
        self._info = file_info(manifest)
        self._shares = bool(manifest.rows.options.get("share_prefixes"))
        self._base = folder / (SHARDS_FOLDER if manifest.layout == "shards" else FILES_FOLDER)
        self._base.mkdir(parents=True, exist_ok=True)
        if self._options.fsync:
            sync_folder(folder)
        self._number = _next_number(folder, name)
        self._max_rows = _FIRST_MAX_ROWS
        self._part: _Part | None = None
        # one thread: while a shard is being synced, the next one takes rows; never more than one waits
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="layertap-shards")
        self._closing: Future[None] | None = None
        self._counts = threading.Lock()
        self.published_samples = 0
        self.published_shards = 0
        self.compression = Compression()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError as closing_error:
            if exc is None:
                raise
            exc.add_note(f"closing the last shard failed, too: {closing_error}")

    def add(self, sample: Sample) -> int:
        """Write a sample. Blocks while two shards are being closed.

        Returns:
            How many of its rows lay in the shard already, as another sample's first ones, and weren't written again.

        Raises:
            StoreFullError: the disk is full; what was complete has been (or will be, by `close`) published.
            OSError: another reason of the disk's.
        """
        try:
            if self._manifest.layout == "shards":
                return self._add_to_shard(sample)
            self._add_as_file(sample)
        except OSError as exc:
            raise _said(exc, self._folder) from exc
        return 0

    def add_failure(self, *, index: int, source_hash: str, sample_id: str | None, reason: str) -> None:
        """Put on record why an input has no sample. A later run tries it again."""
        part = self._open_part()
        part.entries.append(SampleEntry(index=index, source_hash=source_hash, sample_id=sample_id, error=reason))
        if len(part.entries) >= 100 * _FILES_PER_PART:
            self._rotate()

    def flush(self) -> None:
        """Publish what is complete, and wait for it; more may follow.

        Raises:
            OSError: as in `close`.
        """
        self._rotate()
        self._wait()

    def close(self) -> None:
        """Publish what is complete, and wait for it.

        Raises:
            StoreFullError: the disk is full; says how many samples had to be dropped.
            OSError: another reason of the disk's.
        """
        try:
            try:
                self._rotate()
            finally:
                self._wait()
        finally:
            self._closer.shutdown(wait=True)

    def _add_to_shard(self, sample: Sample) -> int:
        before, num_shared = self._stored_before(sample)
        own = len(sample.token_ids) - num_shared
        part = self._part
        if part is not None and part.shard is not None and part.shard.num_rows + own > part.shard.max_rows:
            self._max_rows = min(2 * self._max_rows, _MOST_ROWS)
            self._rotate()
            before, num_shared, own = (), 0, len(sample.token_ids)
        part = self._open_part()
        if part.shard is None:
            fitting = max(1, self._options.shard_bytes // self._info.row_bytes)
            max_rows = max(min(self._max_rows, fitting), own)
            target = self._target(part.path)
            part.shard = ShardWriter(target, self._info, max_rows=max_rows, fsync=self._options.fsync)
        placed = part.shard.append(sample.rows[num_shared:], sample.token_ids[num_shared:], before)
        part.entries.append(self._entry(sample, part.shard.path, placed.row, placed.checksum, before or None))
        if self._shares:
            part.stored.add(sample.token_ids, spans_of(placed.row, len(sample.token_ids), before), own)
        if part.shard.num_bytes >= self._options.shard_bytes or self._is_old(part):
            self._rotate()
        return num_shared

    def _stored_before(self, sample: Sample) -> tuple[Spans, int]:
        if not self._shares or self._part is None or sample.positions is not None:
            return (), 0
        before = self._part.stored.find(sample.token_ids)
        return before, sum(end - start for start, end in before)

    def _add_as_file(self, sample: Sample) -> None:
        info = replace(
            self._info,
            prompt_len=sample.prompt_tokens,
            facts={**self._info.facts, "finish_reason": sample.finish_reason, "index": str(sample.index)},
        )
        path = self._base / f"{sample.index // 1000:06d}" / f"{sample.index:09d}.safetensors"
        file = ShardWriter(path, info, max_rows=len(sample.token_ids), fsync=self._options.fsync)
        try:
            placed = file.append(sample.rows, sample.token_ids)
            file.publish()
            self._note_compression(file)
        finally:
            file.discard()
        part = self._open_part()
        part.entries.append(self._entry(sample, path, placed.row, placed.checksum))
        if len(part.entries) >= _FILES_PER_PART or self._is_old(part):
            self._rotate()

    def _note_compression(self, shard: ShardWriter) -> None:
        if self._info.packed is not None:
            with self._counts:
                row_bytes = shard.num_rows * self._info.row_bytes
                self.compression.add(row_bytes, shard.num_bytes, shard.compress_seconds)

    def _entry(self, sample: Sample, path: Path, row: int, checksum: str, before: Spans | None = None) -> SampleEntry:
        return SampleEntry(
            index=sample.index,
            source_hash=sample.source_hash,
            sample_id=sample.sample_id,
            file=path.relative_to(self._folder).as_posix(),
            row=row,
            tokens=len(sample.token_ids),
            prompt_tokens=sample.prompt_tokens,
            finish_reason=sample.finish_reason,
            checksum=checksum,
            loss_mask=sample.loss_mask,
            positions=sample.positions,
            before=before,
        )

    def _open_part(self) -> _Part:
        if self._part is None:
            path = self._base / f"{self._name}-{self._number:06d}{PART_SUFFIX}"
            self._number += 1
            self._part = _Part(path, self._clock())
        return self._part

    def _target(self, part_path: Path) -> Path:
        return part_path.with_name(part_path.name.removesuffix(PART_SUFFIX) + ".safetensors")

    def _is_old(self, part: _Part) -> bool:
        return self._clock() - part.opened >= self._options.shard_seconds

    def _rotate(self) -> None:
        if self._part is None:
            return
        part, self._part = self._part, None
        try:
            self._wait()
        finally:
            self._closing = self._closer.submit(self._publish, part)

    def _wait(self) -> None:
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.result()

    def _publish(self, part: _Part) -> None:
        dropped = 0
        temporary = temporary_path(part.path)
        # an interrupt may have come between a sample's rows and its line
        while part.shard is not None and part.shard.num_samples > _num_done(part.entries):
            part.shard.drop_last()
        try:
            while True:
                try:
                    if not part.entries:
                        break
                    write_synced(temporary, encode_part(part.entries, self._manifest.id), self._options.fsync)
                    if part.shard is not None and part.shard.num_samples:
                        part.shard.publish()
                        self._note_compression(part.shard)
                    break
                except OSError as exc:
                    temporary.unlink(missing_ok=True)
                    dropped_now = self._drop_last(part) if exc.errno in _FULL else 0
                    if not dropped_now:
                        raise _said(exc, self._folder) from exc
                    dropped += dropped_now
            if part.entries and self._offer is not None:
                offered = temporary_path(part.path)
                temporary.replace(offered)
                self._offer(offered, part.path, part.entries)
            elif part.entries:
                temporary.replace(part.path)
                if self._options.fsync:
                    sync_folder(part.path.parent)
        finally:
            temporary.unlink(missing_ok=True)
            if part.shard is not None:
                part.shard.discard()
        with self._counts:
            self.published_samples += _num_done(part.entries)
            self.published_shards += bool(part.shard is not None and part.entries)
        if dropped:
            full = OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {dropped} samples of the last shard were dropped"
            )
            raise _said(full, self._folder)

    def _drop_last(self, part: _Part) -> int:
        """Take the last sample of a part back to free its space; says how many were. None refers to one behind it."""
        last = next((entry for entry in reversed(part.entries) if entry.file is not None), None)
        if last is None or last.file is None:
            return 0
        part.entries.remove(last)
        if part.shard is not None:
            part.shard.drop_last()
        else:
            (self._folder / last.file).unlink()
        return 1


def _num_done(entries: list[SampleEntry]) -> int:
    return sum(entry.file is not None for entry in entries)


def file_info(manifest: Manifest) -> FileInfo:
    """Return what the files of a data set say of themselves; counts are zero."""
    rows = manifest.rows
    optional = {"revision": rows.revision, "quantization": rows.quantization}
    facts = {
        "dataset": manifest.id,
        "compute_dtype": rows.compute_dtype,
        "engine": rows.engine,
        "engine_version": rows.engine_version,
        "residual": rows.residual,
        **{key: value for key, value in optional.items() if value is not None},
    }
    return FileInfo(
        layers=rows.layers,
        num_rows=0,
        hidden_size=rows.hidden_size,
        dtype=rows.save_dtype,
        first_position=0,
        prompt_len=0,
        num_tokens=0,
        num_layers=rows.num_layers,
        model=rows.model,
        facts=facts,
        packed=Packed() if rows.options.get("compress") else None,
    )


def _next_number(folder: Path, name: str) -> int:
    numbers = (path.name[len(name) + 1 :][:6] for path in folder.glob(f"*/{name}-*"))
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


def write_synced(path: Path, content: bytes, fsync: bool) -> None:
    """Write a small file; with `fsync`, down to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        if fsync:
            os.fsync(file.fileno())


def _said(exc: OSError, folder: Path) -> OSError:
    if isinstance(exc, StoreFullError) or exc.errno not in _FULL:
        return exc
    return StoreFullError(
        exc.errno,
        f"{exc.strerror}: finished samples are kept; make room and run the same command again to continue",
        str(folder),
    )
