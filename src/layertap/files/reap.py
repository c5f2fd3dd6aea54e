"""Leftovers of dead processes, and files nobody fetched: found and removed without ever touching what is being written or read."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from layertap.files.locks import LOCK_SUFFIX, is_held
from layertap.files.paths import SUFFIX, TEMP_SUFFIX, error_path


@dataclass(slots=True)
class Reaped:
    """What was removed (or would be): temporary files of dead writers, orphaned locks, expired files."""

    temporaries: list[Path] = field(default_factory=list)
    locks: list[Path] = field(default_factory=list)
    expired: list[Path] = field(default_factory=list)
    freed_bytes: int = 0


def reap(folder: Path, *, ttl_seconds: float | None = None, dry_run: bool = False, now: float | None = None) -> Reaped:
    """Clean one folder of request files (not its subfolders).

    Args:
        folder: the storage.
        ttl_seconds: published files and error files older than this are removed too; None keeps them.
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
            if not settled and not is_held(path) and deadline is not None and _mtime(path) < deadline:
                _remove(path, dry_run)
                found.locks.append(path)
        elif deadline is not None and (entry.name.endswith(SUFFIX) or entry.name.endswith(SUFFIX + ".error")):
            target = path.with_name(entry.name.removesuffix(".error"))
            lock = target.with_name(target.name + LOCK_SUFFIX)
            if _mtime(path) < deadline and not is_held(lock) and not _in_use(path):
                found.freed_bytes += _remove(path, dry_run)
                _remove(lock, dry_run)
                found.expired.append(path)
    return found


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
