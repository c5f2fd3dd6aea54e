"""Writer threads: tasks of one lane run one after the other, lanes run beside each other."""

import atexit
import collections
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

Task = Callable[[], None]

logger = logging.getLogger(__name__)

_EXIT_PATIENCE_SECONDS = 60.0
_started: "weakref.WeakSet[WriterPool]" = weakref.WeakSet()
os.register_at_fork(
    after_in_child=_started.clear
)  # the threads are the parent's, and its locks may be held for ever here


@atexit.register
def _finish_at_exit() -> None:
    """A script may end right after its last request: what was handed over is still written."""
    deadline = time.monotonic() + _EXIT_PATIENCE_SECONDS
    for pool in list(_started):
        pool.close(max(0.0, deadline - time.monotonic()))


class Lane:
    """The queue of one capture: its tasks keep their order, whichever thread runs them."""

    def __init__(self, pool: "WriterPool") -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._tasks: collections.deque[Task] = collections.deque()
        self._scheduled = False
        self._turn = threading.Lock()  # an interrupt in `submit` may put a lane into the line twice

    def submit(self, task: Task) -> None:
        """Queue a task behind the lane's others. A task must handle its own errors.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._lock:
            self._tasks.append(task)
            if self._scheduled:
                return
            try:  # under the lock: another thread's task must not slip in behind one that is taken back
                self._scheduled = True
                self._pool.enqueue(self)
            except BaseException:
                self._tasks.pop()
                self._scheduled = False
                raise

    def run_one(self) -> bool:
        """Run the first task; True if more are waiting."""
        with self._turn:
            with self._lock:
                if not self._tasks:
                    return False
                task = self._tasks.popleft()
            try:
                task()
            except Exception:  # the thread serves every other request too
                logger.exception("a writer task failed to handle its own error")
            with self._lock:
                self._scheduled = bool(self._tasks)
                return self._scheduled


class WriterPool:
    """A fixed number of threads, started with the first task, that serve lanes in turn."""

    def __init__(self, num_threads: int, name: str = "layertap-writer") -> None:
        self._num_threads = num_threads
        self._name = name
        self._condition = threading.Condition()
        self._ready: collections.deque[Lane] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def lane(self) -> Lane:
        """A new lane."""
        return Lane(self)

    def enqueue(self, lane: Lane) -> None:
        """Put a lane that has tasks into the line."""
        with self._condition:
            if self._closed:
                raise RuntimeError("the writer is closed")
            self._ready.append(lane)
            if self._idle >= len(self._ready):
                self._condition.notify()
            elif len(self._threads) < self._num_threads:
                # daemons: a hanging disk must not keep the interpreter from ending; it waits for close() and not longer
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the machine gives no more threads: those that run do the work
                    if not self._threads:
                        self._ready.remove(lane)
                        raise
                    return
                self._threads.append(thread)
                _started.add(self)

    def close(self, patience_seconds: float | None = None) -> None:
        """Finish all tasks, then end the threads; give up after `patience_seconds`. Idempotent."""
        deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._ready and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if not self._ready:
                    return
                lane = self._ready.popleft()
            while lane.run_one():
                with self._condition:
                    if self._ready:  # others wait: take turns
                        self._ready.append(lane)
                        break
