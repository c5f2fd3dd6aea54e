"""The hand-off between the process that publishes a file and the readers that wait for it.

`<path>.lock` exists, and its writer holds an exclusive flock on it, before a client can learn the path. Readers ask for a shared
one; releasing it (or dying) wakes them. Only the writer's cleanup or the reaper removes the lock file, never a waiting reader.
The lock file's content names its holder, so that a dead writer is noticed where flock isn't to be had (some network file
systems) or where a forked child still holds the descriptor. It is a full block from the start: on a full disk the reason of a
failure can still be written into it.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from layertap.errors import TargetExistsError, WaitTimeoutError, WriterDiedError
from layertap.files.paths import LOCK_SUFFIX

NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What a file system answers that has no flock."""
_CONTENT_BYTES = 4096
_MOST_NOTED = 1 << 20
_NEVER_WAITING = os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe that somebody put there would
_LIVENESS_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.0005, 0.02


def lock_path(path: Path) -> Path:
    """The lock file of a file."""
    return path.with_name(path.name + LOCK_SUFFIX)


@dataclass(frozen=True, slots=True)
class LockContent:
    """What a lock file says: who holds it, why it failed, if it did, and whether it was to replace a file and hasn't yet."""

    holder: dict[str, str | int]
    request_id: str | None = None
    error: str | None = None
    replaces: bool = False

    def holder_is_dead(self) -> bool:
        """True only where it is certain: the same machine, boot and pid namespace, and no such process."""
        here = _identify(os.getpid())
        if not self.holder or any(self.holder.get(key) != here[key] for key in ("host", "boot", "pids")):
            return False
        pid = self.holder.get("pid")
        return not isinstance(pid, int) or start_time(pid) != self.holder.get("start")


class WriterLock:
    """The writer's side: held from admission to publication.

    Raises:
        TargetExistsError: another process or request is about to publish the same path.
    """

    def __init__(
        self, path: Path, request_id: str | None, *, patience_seconds: float = 5.0, replaces: bool = False
    ) -> None:
        self.path = lock_path(path)
        self._request_id = request_id
        self._replaces = replaces
        self._told = False
        self._fd, self._flocked = _acquire(self.path, patience_seconds)
        try:
            self._write(None)
        except BaseException:
            self.remove()
            raise

    def note_replaced(self) -> None:
        """The file that stood there is replaced: a reader may have what it finds."""
        if self._replaces:
            self._replaces = False
            self._write(None)

    def note_error(self, reason: str) -> None:
        """Put the reason into the lock file itself: the last resort on a full disk."""
        self._write(reason)
        self._told = True

    def _write(self, error: str | None) -> None:
        content: dict[str, object] = {"holder": _identify(os.getpid()), "request_id": self._request_id, "error": error}
        if self._replaces:
            content["replaces"] = True
        raw = json.dumps(content).encode()
        if len(raw) > _CONTENT_BYTES:
            raw = json.dumps({**content, "error": (error or "")[:500]}).encode()
        os.pwrite(self._fd, raw.ljust(_CONTENT_BYTES, b" "), 0)

    def release(self) -> None:
        """Wake the readers. The lock file stays, but where there is no flock: its content would go on saying that we write."""
        if self._fd >= 0 and not (self._flocked or self._told):
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        self._close()

    def remove(self) -> None:
        """Take the lock file away and release it (nobody learnt the path)."""
        self.path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # unlock explicitly: a forked child may still hold a copy of the descriptor
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):  # the descriptor is gone either way
                os.close(fd)


def read_content(lock: Path) -> LockContent | None:
    """What the lock file says; None where there is none or it says nothing."""
    try:
        parsed = json.loads(read_note(lock))
        holder = parsed["holder"]
        if not isinstance(holder, dict):
            return None
        return LockContent(holder, parsed.get("request_id"), parsed.get("error"), parsed.get("replaces") is True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_held(lock: Path) -> bool:
    """True while a live writer holds the lock."""
    try:
        fd = open_for_flock(lock)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as exc:
        content = read_content(lock)
        dead = content is not None and content.holder_is_dead()
        return not dead if exc.errno in {errno.EWOULDBLOCK, errno.EACCES} else content is not None and not dead
    else:
        return False
    finally:
        os.close(fd)


def wait_for_writer(path: Path, timeout_seconds: float) -> None:
    """Return when nobody is about to publish `path` any more, or at once where there is no lock file.

    Raises:
        WaitTimeoutError: the writer still holds it.
        WriterDiedError: the writer is gone although its descriptor lives on in another process.
    """
    lock = lock_path(path)
    deadline = time.monotonic() + timeout_seconds
    next_check = time.monotonic() + _LIVENESS_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            fd = open_for_flock(lock)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            flock_works = exc.errno in {errno.EWOULDBLOCK, errno.EACCES}
            if not flock_works and exc.errno not in NO_FLOCK:
                raise
            if not flock_works and path.exists():
                return
        else:
            return
        finally:
            os.close(fd)
        now = time.monotonic()
        if now >= next_check or not flock_works:
            next_check = now + _LIVENESS_SECONDS
            content = read_content(lock)
            if content is not None and content.error is not None:
                return
            if content is not None and content.holder_is_dead() and not path.exists():
                raise WriterDiedError(
                    f"{path}: its writer (process {content.holder.get('pid')}) died before it was published",
                    request_id=content.request_id,
                )
        if now >= deadline:
            raise WaitTimeoutError(
                f"{path}: still being written after {timeout_seconds:g} s; the writer is alive, so a longer timeout may help"
            )
        time.sleep(min(pause, max(0.0, deadline - now)))
        pause = min(pause * 1.5, _LAST_PAUSE_SECONDS)


def _acquire(lock: Path, patience_seconds: float) -> tuple[int, bool]:
    """The descriptor, and whether the lock is more than the file's content."""
    deadline = time.monotonic() + patience_seconds
    while True:
        fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            content = read_content(lock)
            if exc.errno in NO_FLOCK and (content is None or content.error or content.holder_is_dead()):
                return fd, False
            os.close(fd)
            if exc.errno not in {errno.EWOULDBLOCK, errno.EACCES} | NO_FLOCK:
                raise
            # a reader's shared lock goes away by itself, a writer's doesn't
            if time.monotonic() >= deadline:
                holder = (
                    f"process {content.holder.get('pid')} on {content.holder.get('host')}"
                    if content
                    else "another process"
                )
                raise TargetExistsError(
                    errno.EEXIST, f"is being written (or read) by {holder}; use another path or wait", str(lock)
                ) from exc
            time.sleep(0.01)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(fd).st_ino:
                return fd, True
        os.close(fd)  # it was removed between open and flock: take the new one


def open_for_flock(path: Path) -> int:
    """Open a file to lock it: for writing where that is permitted, since NFS grants an exclusive flock on such descriptors only."""
    try:
        return os.open(path, os.O_RDWR | _NEVER_WAITING)
    except PermissionError:
        return os.open(path, os.O_RDONLY | _NEVER_WAITING)
    except OSError as exc:
        if exc.errno == errno.EROFS:
            return os.open(path, os.O_RDONLY | _NEVER_WAITING)
        raise


def read_note(path: Path) -> bytes:
    """The content of a lock or error file.

    Raises:
        OSError: there is none.
    """
    with open(os.open(path, os.O_RDONLY | _NEVER_WAITING), "rb", buffering=0) as file:
        return file.read(_MOST_NOTED) or b""


def _identify(pid: int) -> dict[str, str | int]:
    start, boot, pids = _facts_of(pid)
    return {"pid": pid, "start": start, "host": socket.gethostname(), "boot": boot, "pids": pids}


@functools.lru_cache(maxsize=1)
def _facts_of(pid: int) -> tuple[str, str, str]:
    # these never change for a living process, and a lock is taken for every file
    return start_time(pid), _read("/proc/sys/kernel/random/boot_id"), _pid_namespace()


# a child may have its parent's number, in a pid namespace of its own
os.register_at_fork(after_in_child=_facts_of.cache_clear)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks: with its pid it names a process for good. "" where there is none."""
    # field 22 of /proc/PID/stat, counted behind the command's name, which may hold spaces; a zombie counts as dead
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
