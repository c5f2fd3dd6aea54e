"""Leftovers of dead processes, and files nobody fetched: found and removed without ever touching what is being written or read."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from layertap.errors import HiddenStatesError
from layertap.files.locks import LOCK_SUFFIX, is_held, read_content
from layertap.files.paths import SUFFIX, TEMP_SUFFIX, error_path
from layertap.files.read import read_header


@dataclass(slots=True)
class Reaped:
    """What was removed (or would be): temporary files of dead writers, orphaned locks, expired files."""

    temporaries: list[Path] = field(default_factory=list)
    locks: list[Path] = field(default_factory=list)
    expired: list[Path] = field(default_factory=list)
    freed_bytes: int = 0


TTL_FACT = "ttl_seconds"
"""The fact in a file's metadata that says that its server may remove it after so many seconds."""

_HEADER_PROBE_BYTES = 1 << 16


def reap(
    folder: Path,
    *,
    ttl_seconds: float | None = None,
    only_marked: bool = False,
    dry_run: bool = False,
    now: float | None = None,
) -> Reaped:
    """Clean one folder of request files (not its subfolders). Files that aren't layertap's are never touched.

    Args:
        folder: the storage.
        ttl_seconds: published files and error files older than this are removed too; None keeps them.
        only_marked: of the published files, remove only those whose metadata say that they expire (a server wrote them).
        dry_run: only say what would go.
        now: seconds since the epoch, for tests.

    Raises:
        OSError: the folder can't be read.
    """
    found = Reaped()
    deadline = None if ttl_seconds is None else (time.time() if now is None else now) - ttl_seconds
    for entry in list(_entries(folder)):
        path = Path(entry.path)
        if entry.name.startswith(".") and entry.name.endswith(TEMP_SUFFIX):
            if not _in_use(path):
                found.freed_bytes += _remove(path, dry_run)
                found.temporaries.append(path)
        elif entry.name.endswith(LOCK_SUFFIX):
            target = path.with_name(entry.name.removesuffix(LOCK_SUFFIX))
            # a lock without a file or a reason tells waiting readers that the writer died: keep it for them for a while
            settled = target.exists() or error_path(target).exists()
            expired = deadline is not None and _mtime(path) < deadline
            if expired and not settled and _is_our_lock(path) and not is_held(path):
                _remove(path, dry_run)
                found.locks.append(path)
        elif deadline is not None and (entry.name.endswith(SUFFIX) or entry.name.endswith(SUFFIX + ".error")):
            target = path.with_name(entry.name.removesuffix(".error"))
            lock = target.with_name(target.name + LOCK_SUFFIX)
            ours = _is_ours(path, only_marked) if path == target else _is_error(path)
            if _mtime(path) < deadline and ours and not is_held(lock) and not _in_use(path):
                found.freed_bytes += _remove(path, dry_run)
                _remove(lock, dry_run)
                found.expired.append(path)
    return found


def remove_idle(path: Path) -> int | None:
    """Remove one file with its lock and error file, unless it is being written or read.

    Returns:
        The bytes freed, or None where it stays.
    """
    lock = path.with_name(path.name + LOCK_SUFFIX)
    if is_held(lock) or _in_use(path):
        return None
    freed = _remove(path, False)
    _remove(error_path(path), False)
    _remove(lock, False)
    return freed


def _is_ours(path: Path, only_marked: bool) -> bool:
    """Whether a file's header is layertap's; a folder may hold a model's weights too."""
    try:
        with open(path, "rb") as file:
            start = file.read(_HEADER_PROBE_BYTES)
    except OSError:
        return False
    # the names are sorted: what stands behind `row_digests` would be out of sight in a long file
    if b'"layertap_format":"' not in start[8:] or not start[8:].startswith(b'{"__metadata__":{'):
        return False
    if not only_marked:
        return True
    try:
        return TTL_FACT in read_header(path).info.facts
    except HiddenStatesError:
        return False


def _is_our_lock(path: Path) -> bool:
    """Many programs call a file `*.lock`; ours name their holder, or are empty where their writer died at once."""
    try:
        empty = path.stat().st_size == 0
    except OSError:
        return False
    return path.name.endswith(SUFFIX + LOCK_SUFFIX) if empty else read_content(path) is not None


def _is_error(path: Path) -> bool:
    try:
        return "reason" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it may vanish meanwhile
                if entry.is_file(follow_symlinks=False):
                    yield entry


def _in_use(path: Path) -> bool:
    """A living writer holds a flock on its temporary file, a reader that wants to keep a file a shared one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # also where flock isn't to be had: when in doubt, keep
    else:
        return False
    finally:
        os.close(fd)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _remove(path: Path, dry_run: bool) -> int:
    try:
        size = path.stat().st_size
        if not dry_run:
            path.unlink()
    except OSError:
        return 0
    return size
