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
from layertap.files.locks import NO_FLOCK, is_held, lock_path, open_for_flock, read_content
from layertap.files.paths import ERROR_SUFFIX, LOCK_SUFFIX, SUFFIX, TEMP_SUFFIX, error_path
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
            with _held(path, without_flock=False) as idle:  # nobody says there that its writer is dead
                if idle and (freed := _remove(path, dry_run)) is not None:
                    found.freed_bytes += freed
                    found.temporaries.append(path)
        elif deadline is None:
            continue
        elif entry.name.endswith(LOCK_SUFFIX):
            if _is_orphan(path, deadline):
                with _no_writer(path) as idle:
                    if idle and _is_orphan(path, deadline) and _remove(path, dry_run) is not None:
                        found.locks.append(path)
        elif entry.name.endswith(SUFFIX) or entry.name.endswith(SUFFIX + ERROR_SUFFIX):
            target = path.with_name(entry.name.removesuffix(ERROR_SUFFIX))
            if _mtime(path) < deadline and (_is_ours(path, only_marked) if path == target else _is_error(path)):
                lock = lock_path(target)
                # looked at once more when nobody can write it any more: it may have been replaced meanwhile
                with _no_writer(lock) as unwritten, _held(path) as unread:
                    if not (unwritten and unread and _mtime(path) < deadline):
                        continue
                    if (freed := _remove(path, dry_run)) is not None:
                        _remove(lock, dry_run)
                        found.freed_bytes += freed
                        found.expired.append(path)
    return found


def remove_idle(path: Path) -> int | None:
    """Remove one file with its lock and error file, unless it is being written or read.

    Returns:
        The bytes freed, or None where it stays.

    Raises:
        OSError: it can't be removed.
    """
    lock = lock_path(path)
    freed = 0
    with _no_writer(lock) as unwritten, _held(path) as unread:
        if not (unwritten and unread):
            return None
        for one in (path, error_path(path), lock):
            with contextlib.suppress(FileNotFoundError):
                size = one.stat().st_size
                one.unlink()
                freed += size if one == path else 0
    return freed


def _is_orphan(lock: Path, deadline: float) -> bool:
    """A lock without a file or a reason tells waiting readers that the writer died: it is kept for them for a while."""
    target = lock.with_name(lock.name.removesuffix(LOCK_SUFFIX))
    settled = target.exists() or error_path(target).exists()
    return not settled and _mtime(lock) < deadline and _is_our_lock(lock)


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


@contextlib.contextmanager
def _held(path: Path, *, without_flock: bool = True) -> Iterator[bool]:
    """Hold a file's flock, so that nobody begins to use it while it is removed. False while somebody does.

    A living writer holds a flock on its temporary file, a reader that wants to keep a file a shared one.

    Args:
        path: the file; one that isn't there is used by nobody.
        without_flock: the answer where flock isn't to be had.
    """
    try:
        fd = open_for_flock(path)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            idle = True
        except OSError as exc:
            idle = without_flock and exc.errno in NO_FLOCK
        yield idle
    finally:
        os.close(fd)


@contextlib.contextmanager
def _no_writer(lock: Path) -> Iterator[bool]:
    """Hold a writers' lock while what it stands for is removed. False while a living writer does."""
    with _held(lock, without_flock=False) as held:
        # not held: by a reader for a moment, by a copy of a dead writer's descriptor, or since there is no flock
        yield held or not is_held(lock)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _remove(path: Path, dry_run: bool) -> int | None:
    """Remove a file; returns its size, or None where somebody else removed it or it can't be."""
    try:
        size = path.stat().st_size
        if not dry_run:
            path.unlink()
    except OSError:
        return None
    return size
