"""What the server knows of captures: which run, which are ready, which failed and why. For the file routes, metrics and the page.

The store itself is the truth (files, locks, error twins); the book adds what can't be read from it: custom paths, progress,
what was fetched. It is bounded: the oldest ended captures are forgotten.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from layertap.writing.kinds import kind_of
from layertap.writing.recorder import Capture, describe
from layertap.writing.sinks import Result

State = Literal["writing", "ready", "failed"]

_KEPT = 20_000
_DONE: "Future[None]" = Future()
_DONE.set_result(None)
_KEPT_FAILURES = 500


@dataclass(slots=True, kw_only=True)
class Entry:
    """One capture.

    Attributes:
        name: the id by which clients ask for it.
        file: its path on this machine; as text, since thousands of entries are kept.
        state: where it stands.
        admitted, ended: seconds since the epoch.
        num_rows, num_bytes: of the finished file.
        layers: ids, in the file's order.
        reason: why it failed.
        kind: of the failure, see writing.kinds.
        fetched: it was delivered in whole over HTTP.
        done: resolved once it is ready or has failed.
    """

    name: str
    file: str
    layers: tuple[int, ...]
    admitted: float
    state: State = "writing"
    ended: float | None = None
    num_rows: int = 0
    num_bytes: int = 0
    reason: str | None = None
    kind: str | None = None
    fetched: bool = False
    done: "Future[None]" = field(default_factory=Future)

    @property
    def path(self) -> Path:
        """Of its file on this machine."""
        return Path(self.file)


@dataclass(slots=True)
class Totals:
    """Sums since the start."""

    files: dict[str, int] = field(default_factory=lambda: {"ready": 0, "failed": 0})
    failures: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    num_bytes: int = 0


class Book:
    """Thread-safe."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._running = 0
        self.totals = Totals()
        self.on_ready: Callable[[Entry], None] | None = None
        self.failures: deque[Entry] = deque(maxlen=_KEPT_FAILURES)

    def follow(self, captures: Iterable[Capture | None]) -> None:
        """Enter captures that were just admitted, and keep their states up to date."""
        for capture in captures:
            if capture is None or capture.path is None:
                continue
            entry = Entry(
                name=capture.request_id, file=str(capture.path), layers=capture.spec.layers, admitted=time.time()
            )
            with self._lock:
                self._entries[entry.name] = entry
                self._running += 1
                self._forget_oldest()
            capture.result.add_done_callback(lambda done, entry=entry: self._settle(entry, done))  # type: ignore[misc]

    def _settle(self, entry: Entry, done: "Future[Result]") -> None:
        error = done.exception()
        with self._lock:
            self._running -= 1
            entry.ended = time.time()
            if error is None:
                self._note_ready(entry, done.result())
            else:
                self._note_failed(entry, error)
        entry.done.set_result(None)
        entry.done = _DONE  # a future is most of an entry's memory
        if self.on_ready is not None and entry.state == "ready":
            self.on_ready(entry)

    def _note_ready(self, entry: Entry, result: Result) -> None:
        entry.state, entry.num_rows, entry.num_bytes = "ready", result.info.num_rows, result.info.data_bytes
        self.totals.files["ready"] += 1
        self.totals.rows += entry.num_rows
        self.totals.num_bytes += entry.num_bytes

    def _note_failed(self, entry: Entry, error: BaseException) -> None:
        entry.state, entry.reason, entry.kind = "failed", describe(error), kind_of(error)
        self.totals.files["failed"] += 1
        self.totals.failures[entry.kind] = self.totals.failures.get(entry.kind, 0) + 1
        self.failures.append(entry)

    def _forget_oldest(self) -> None:
        while len(self._entries) > self._kept:
            name = next((name for name, entry in self._entries.items() if entry.state != "writing"), None)
            if name is None:
                return
            del self._entries[name]

    def get(self, name: str) -> Entry | None:
        """The entry of an id, if it is still known."""
        with self._lock:
            return self._entries.get(name)

    def note_fetched(self, name: str) -> None:
        """The file was delivered."""
        with self._lock:
            if name in self._entries:
                self._entries[name].fetched = True

    def fetched_paths(self) -> set[Path]:
        """Files that were delivered and so may go when room is needed."""
        with self._lock:
            return {entry.path for entry in self._entries.values() if entry.fetched}

    def latest(self, count: int) -> list[Entry]:
        """The newest entries, newest first."""
        with self._lock:
            return [self._entries[name] for name, _ in zip(reversed(self._entries), range(count), strict=False)]

    @property
    def num_writing(self) -> int:
        """Captures on their way."""
        with self._lock:
            return self._running
