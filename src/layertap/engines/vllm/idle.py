"""Steps of an engine that has nothing to do, so that what is published after its last step gets into vLLM's metrics.

vLLM takes a connector's numbers with a step, and makes none where there is no request; files are published behind the step in
which their request ended. So after each end a step is asked for, again and again with growing pauses: what was published an age
after the end is shown within twice that age. These steps compute nothing. vLLM steps for a connector that says it has work
(`has_pending_push_work`); an idle engine's loop has to be woken to ask.
"""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_SECONDS, LAST_SECONDS = 0.05, 1000.0


class IdleSteps:
    """Belongs to a scheduler's connector; thread-safe.

    Args:
        first_seconds: the first step is asked for so long after a request's end.
        last_seconds: no step is asked for later than this.

    Attributes:
        wanted: a step is wanted now.
    """

    def __init__(self, first_seconds: float = FIRST_SECONDS, last_seconds: float = LAST_SECONDS) -> None:
        self.wanted = False
        self._first, self._last = first_seconds, last_seconds
        self._wake: Callable[[Callable[[], None]], None] | None = None
        self._ended = 0.0
        self._pause: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def connect(self, wake: Callable[[Callable[[], None]], None]) -> None:
        """How the engine's loop is woken: `wake(mark)` calls `mark` before it, or does nothing where it must not step now.

        Without it (an engine in the caller's own process has no loop) no step is ever asked for.
        """
        self._wake = wake

    def ended(self) -> None:
        """A request whose rows are published ended."""
        if self._wake is None:
            return
        with self._changed:
            self._ended, self._pause = time.monotonic(), self._first
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="layertap-idle", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stepped(self) -> None:
        """A step is made."""
        self.wanted = False

    def close(self) -> None:
        """Ask for no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _mark(self) -> None:
        self.wanted = True

    def _run(self) -> None:
        while self._wait():
            assert self._wake is not None
            try:
                self._wake(self._mark)
            except Exception:  # numbers aren't worth an engine
                logger.exception("layertap: the metrics of an idle engine")
                return

    def _wait(self) -> bool:
        """Until the next step is due; False when there is none any more."""
        with self._changed:
            while not self._closed:
                if self._pause is None:
                    self._changed.wait()
                    continue
                left = self._ended + self._pause - time.monotonic()
                if left <= 0:
                    self._pause = self._pause * 2 if self._pause * 2 <= self._last else None
                    return True
                self._changed.wait(left)
        return False
