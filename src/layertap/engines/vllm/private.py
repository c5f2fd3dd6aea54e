"""A folder in memory for rows that are only passed on. It goes with its process; a killed one's is removed by the next."""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "layertap-rows-"
_OWNER = ".owner"
_YOUNG_SECONDS = 60.0


class PrivateFolder:
    """A new folder, and an end to those whose processes are gone.

    Args:
        parent: where; by default memory where there is such a file system.

    Attributes:
        path: the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        where = parent or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        _remove_orphans(where)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        owner = os.open(self.path / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        self._end = weakref.finalize(self, _remove, self.path, owner, os.getpid())

    def remove(self) -> None:
        """Idempotent; happens by itself when the object or the interpreter ends."""
        self._end()


def _remove(path: Path, owner: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)
        os.close(owner)


def _remove_orphans(where: Path) -> None:
    for folder in where.glob(f"{_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue  # its owner may be about to take the lock
            owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or going already
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(owner)
