"""The reaper's thread: nobody has to clean up.

What a dead process left goes at the start, what is older than its time to live goes as time passes, and where room is needed, what
was delivered over HTTP goes first. What is being written or read never goes. A round that fails is logged and tried again: if the
thread ended, the store would fill up.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from layertap.capture.options import StoreOptions
from layertap.files.reap import Reaped, reap, remove_idle
from layertap.files.tags import expire_tags
from layertap.writing.room import StoreRoom

logger = logging.getLogger(__name__)


class Reaper:
    """Cleans one store.

    Args:
        options: the store's: where, and how long files live.
        room: told what was freed.
        delivered: tells what was delivered.
        count: called with why ("leftover", "expired", "quota"), files and bytes.
        seconds: between two rounds.
    """

    def __init__(
        self,
        options: StoreOptions,
        room: StoreRoom,
        *,
        delivered: Callable[[], set[Path]] = set,
        count: Callable[[str, int, int], None] = lambda _why, _files, _bytes: None,
        seconds: float = 10.0,
    ) -> None:
        self._ttl_seconds = options.ttl_seconds
        self._folder = room.folder
        self._room = room
        self._delivered = delivered
        self._count = count
        self._seconds = seconds if self._ttl_seconds is None else min(seconds, self._ttl_seconds)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_round: float | None = None

    def start(self) -> None:
        """Clean what a dead process left, then go on in the background."""
        self._room.make_room = self.make_room
        self._room.counts_running = True
        self.round()
        self._thread = threading.Thread(target=self._run, name="layertap-reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.round()

    def round(self, now: float | None = None) -> Reaped:
        """Clean once.

        Args:
            now: seconds since the epoch, for tests.
        """
        found = Reaped()
        try:
            if self._folder.is_dir():
                found = reap(self._folder, ttl_seconds=self._ttl_seconds, only_marked=True, now=now)
                if self._ttl_seconds is not None:
                    expire_tags(str(self._folder), (time.time() if now is None else now) - self._ttl_seconds)
            self._room.recount()
        except Exception:
            logger.exception("a round of the reaper failed; it goes on")
        self._count("leftover", len(found.temporaries) + len(found.locks), 0)
        self._count("expired", len(found.expired), found.freed_bytes)
        if found.expired or found.temporaries:
            logger.info(
                "reaped %d expired files and %d leftovers, %d bytes",
                len(found.expired),
                len(found.temporaries) + len(found.locks),
                found.freed_bytes,
            )
        self.last_round = time.time()
        return found

    def make_room(self, num_bytes: int) -> None:
        """Remove what was delivered, oldest first, until so many bytes are free."""
        freed = 0
        for path in sorted(self._delivered(), key=_age):
            if freed >= num_bytes:
                break
            removed = None
            if path.parent == self._folder and path.exists():
                with contextlib.suppress(OSError):  # the next one may go
                    removed = remove_idle(path)
            if removed is not None:
                freed += removed
                self._count("quota", 1, removed)
        self._room.recount()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
