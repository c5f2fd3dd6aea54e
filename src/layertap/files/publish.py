"""A file on its way: rows are written where they belong as they arrive, the header last, then one rename publishes it.

Until the rename nobody can take it for a finished file (its name is hidden and has another suffix); afterwards it is complete.
If it can't be finished, `<path>.error` says why, and its reader raises that reason.
"""

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layertap.errors import TargetExistsError
from layertap.files import format as fmt
from layertap.files.locks import WriterLock
from layertap.files.paths import error_path, quarantine_path, temporary_path

_FILE_MODE = 0o664  # cut by the umask; never world-writable
_READERS_MOMENT_SECONDS = 1.0  # readers that wait look at the lock every so often, and each look holds it for a moment


class PendingFile:
    """One file between its reservation and its publication (or its error).

    `write` may be called from one thread at a time for one row; `publish` and `fail` end it.

    Args:
        path: the target, absolute.
        info: what is known already; `num_rows` is ignored.
        max_rows: the most rows that may come; space for their digests is kept in the header.
        overwrite: replace an existing target by the rename.
        lock: let readers wait on `<path>.lock`.
        fsync: sync the file and its folder before and after the rename.
        request_id: named in the lock and the error file.

    Raises:
        TargetExistsError: the target exists and `overwrite` is false, or another writer is about to publish it.
        OptionError: so many rows may come that their digests don't fit into a header.
        OSError: the folder can't be made or written to.
    """

    def __init__(
        self,
        path: Path,
        info: fmt.FileInfo,
        max_rows: int,
        *,
        overwrite: bool = False,
        lock: bool = True,
        fsync: bool = False,
        request_id: str | None = None,
    ) -> None:
        self.path = path
        self._info = info
        self._overwrite = overwrite
        self._fsync = fsync
        self._request_id = request_id
        self._reserve = fmt.header_reserve(info, max_rows)
        self._lock: WriterLock | None = None
        self._fd = -1
        self._ended = threading.Lock()
        _make_folder(path.parent, fsync)
        self._refuse_existing()
        # a reader that finds the old file after this writer has died must not take it for the new one
        replaces = overwrite and os.path.lexists(path)
        self._lock = WriterLock(path, request_id, replaces=replaces) if lock else None
        try:
            self._refuse_existing()  # it may have been published while we waited for the lock
            error_path(path).unlink(missing_ok=True)
            self.temporary, self._fd = _create_temporary(path)
        except BaseException:
            if self._lock is not None:
                self._lock.remove()
            raise

    def write(self, row: int, first_slot: int, data: NDArray[np.uint8]) -> None:
        """Write `data` [rows, slots, bytes of a slot] at row `row`, layer slots `first_slot` on.

        Raises:
            OSError: the disk's reason.
        """
        num_rows, num_slots, slot_bytes = data.shape
        num_layers = len(self._info.layers)
        if num_slots == num_layers:
            pwrite_all(self._fd, np.ascontiguousarray(data), self._reserve + row * num_slots * slot_bytes)
            return
        for i in range(num_rows):  # a pipeline stage's part of each row
            offset = self._reserve + ((row + i) * num_layers + first_slot) * slot_bytes
            pwrite_all(self._fd, np.ascontiguousarray(data[i]), offset)

    def write_packed(self, block: NDArray[np.uint8], offset: int) -> None:
        """Write a block of compressed rows, `offset` bytes behind the first.

        Raises:
            OSError: the disk's reason.
        """
        pwrite_all(self._fd, block, self._reserve + offset)

    def read_back(self, row: int, num_rows: int) -> NDArray[np.uint8]:
        """Rows that were written, uint8 [num_rows, bytes of a row]."""
        out = np.empty((num_rows, self._info.row_bytes), np.uint8)
        self._fill(out, row * self._info.row_bytes)
        return out

    def read_slot(self, row: int, slot: int) -> NDArray[np.uint8]:
        """One layer of a row that was written, uint8 [bytes of a slot]."""
        size = self._info.row_bytes // len(self._info.layers)
        out = np.empty(size, np.uint8)
        self._fill(out, row * self._info.row_bytes + slot * size)
        return out

    def _fill(self, out: NDArray[np.uint8], offset: int) -> None:
        view, done = (out.data.cast("B") if out.size else memoryview(b"")), 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], self._reserve + offset + done)
            if got == 0:
                raise OSError(errno.EIO, "rows that were written can't be read back", str(self.temporary))
            done += got

    def publish(
        self,
        *,
        first_row: int,
        token_ids: NDArray[np.int64],
        digests: NDArray[np.uint64],
        first_position: int,
        num_tokens: int,
        facts: Mapping[str, str],
        table: NDArray[np.int64] | None = None,
    ) -> fmt.FileInfo:
        """Finish and publish the rows `first_row` on, one per token id; `table` is that of the blocks, where rows are compressed.

        Raises:
            TargetExistsError: the target came into being meanwhile.
            OSError: the disk's reason. The caller then calls `fail`.
        """
        info = self._complete(first_row, token_ids, digests, first_position, num_tokens, facts, table)
        self._rename()
        if self._fsync:
            self._sync_rename()
        with self._ended:
            self._close()
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the file is there; a stale mark can only make its reader complain
                self._lock.note_replaced()
            self._lock.release()
        return info

    def quarantine(
        self,
        reason: str,
        *,
        first_row: int,
        token_ids: NDArray[np.int64],
        digests: NDArray[np.uint64],
        first_position: int,
        num_tokens: int,
        facts: Mapping[str, str],
    ) -> Path:
        """Keep rows that failed a check under a name that no reader takes, and tell the reader why, and where they are.

        Returns:
            The file in quarantine.

        Raises:
            OSError: the disk's reason. The caller then calls `fail`.
        """
        self._complete(first_row, token_ids, digests, first_position, num_tokens, facts)
        aside = quarantine_path(self.path)
        write_error(aside, reason, self._request_id)
        try:
            self.temporary.replace(aside)
        except OSError:
            error_path(aside).unlink(missing_ok=True)
            raise
        with self._ended:
            self._close()
        self._tell(kept_aside(reason, aside))
        return aside

    def _complete(
        self,
        first_row: int,
        token_ids: NDArray[np.int64],
        digests: NDArray[np.uint64],
        first_position: int,
        num_tokens: int,
        facts: Mapping[str, str],
        table: NDArray[np.int64] | None = None,
    ) -> fmt.FileInfo:
        """Write what is missing of the temporary file."""
        num_rows = len(token_ids)
        info = replace(
            self._info,
            num_rows=num_rows,
            first_position=first_position,
            num_tokens=num_tokens,
            facts={**self._info.facts, **facts},
            packed=None if table is None else fmt.Packed.of(table),
        )
        if first_row:  # only `positions: "last"` of generated tokens: a handful of rows
            pwrite_all(self._fd, self.read_back(first_row, num_rows), self._reserve)
        end = self._reserve + info.stored_bytes
        pwrite_all(self._fd, token_ids.astype("<i8"), end)
        if table is not None:
            last = int(table[-1, 1])
            pwrite_all(self._fd, np.zeros(info.stored_bytes - last, np.uint8), self._reserve + last)
            pwrite_all(self._fd, table.astype("<i8").reshape(-1), end + 8 * num_rows)
        os.ftruncate(self._fd, self._reserve + info.data_bytes)
        pwrite_all(self._fd, np.frombuffer(fmt.encode_header(info, digests, self._reserve), np.uint8), 0)
        if self._fsync:
            os.fsync(self._fd)
        # network file systems say on close what they couldn't store: ask before the rename, through a second descriptor
        os.close(os.dup(self._fd))
        return info

    def fail(self, reason: str) -> None:
        """Drop what was written and tell the reader why. Idempotent; does nothing after `publish`. Never raises."""
        with self._ended:
            if self._fd < 0:
                return
            self._drop_temporary()  # first: the error file may need the space
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        noted = False
        with contextlib.suppress(OSError):
            write_error(self.path, reason, self._request_id)
            noted = True
        if self._lock is not None:
            if not noted:
                with contextlib.suppress(OSError):
                    self._lock.note_error(reason)
            self._lock.release()

    def discard(self) -> None:
        """Drop what was written, with its lock, without a word: nobody learnt the path. Idempotent. Never raises."""
        with self._ended:
            if self._fd < 0:
                return
            self._drop_temporary()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.remove()

    def _refuse_existing(self) -> None:
        if not self._overwrite and os.path.lexists(self.path):
            raise TargetExistsError(errno.EEXIST, "exists already; `overwrite` would replace it", str(self.path))

    def _rename(self) -> None:
        if self._overwrite:
            self.temporary.replace(self.path)
            return
        try:
            os.link(self.temporary, self.path)  # unlike rename, it refuses an existing name
        except FileExistsError as exc:
            raise TargetExistsError(
                errno.EEXIST, "came into being meanwhile; nothing was replaced", str(self.path)
            ) from exc
        except OSError as exc:
            if exc.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                raise
            self._refuse_existing()  # no hard links here: the lock keeps other layertap writers away
            self.temporary.replace(self.path)
        else:
            self.temporary.unlink()

    def _sync_rename(self) -> None:
        try:
            sync_folder(self.path.parent)
        except OSError:
            self.path.unlink(missing_ok=True)  # its reader will be told the reason, so it must not find a file
            raise

    def _drop_temporary(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.temporary.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # the descriptor is gone either way
            os.close(fd)


def write_error(path: Path, reason: str, request_id: str | None) -> None:
    """Publish `<path>.error`, atomically."""
    target = error_path(path)
    record: dict[str, object] = {"reason": reason, "request_id": request_id}
    with contextlib.suppress(OSError):  # the file that was to be replaced: its reader must not take it for the new one
        record["stands"] = fmt.identity(os.stat(path))
    temporary, fd = _create_temporary(target)
    try:
        with open(fd, "w") as file:
            json.dump(record, file)
            file.flush()
            os.close(os.dup(fd))  # as in `PendingFile`
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def kept_aside(reason: str, aside: Path) -> str:
    """The reason for a reader whose file was found wrong."""
    return f"{reason}; the file is kept as {aside.name}"


def set_aside(path: Path, reason: str, checked: os.stat_result) -> Path:
    """Move a published file that was found wrong to quarantine. Its readers are told the reason from the first moment on.

    Args:
        path: the file.
        reason: what is wrong with it.
        checked: the file that was looked at; another one that has taken its place stays.

    Returns:
        The file in quarantine.

    Raises:
        TargetExistsError: the file is another one by now, or is being written anew.
        OSError: the folder can't be written to.
    """
    lock = WriterLock(path, None, patience_seconds=_READERS_MOMENT_SECONDS)
    try:
        if fmt.identity(os.stat(path)) != fmt.identity(checked):
            raise TargetExistsError(errno.EEXIST, "is another file than the one that was checked", str(path))
        aside = quarantine_path(path)
        write_error(aside, reason, None)
        write_error(path, kept_aside(reason, aside), None)
        path.replace(aside)
        sync_folder(path.parent)
    finally:
        lock.remove()
    return aside


def _create_temporary(path: Path) -> tuple[Path, int]:
    """A new file beside `path` and its descriptor, whose flock tells the reaper that it has a living writer."""
    while True:
        temporary = temporary_path(path)
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, _FILE_MODE)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)  # waits for a reaper that looks at it in this moment
            if os.fstat(fd).st_nlink:
                return temporary, fd
        except BaseException:
            temporary.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # the reaper was here before us


def pwrite_all(fd: int, data: NDArray[np.generic], offset: int) -> None:
    """Write all bytes of a C-contiguous array at `offset`."""
    if data.size == 0:
        return
    view = data.view(np.uint8).data.cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + (1 << 30)], offset + done)


def _make_folder(folder: Path, fsync: bool) -> None:
    """Make a folder and its parents; with `fsync`, their names survive a power loss as the file's does."""
    missing = []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        if fsync:
            sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
