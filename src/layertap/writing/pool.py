"""Writer threads: tasks of one lane run one after the other, lanes run beside each other."""

import collections
import logging
import threading
from collections.abc import Callable

Task = Callable[[], None]

logger = logging.getLogger(__name__)


class Lane:
    """The queue of one capture: its tasks keep their order, whichever thread runs them."""

    def __init__(self, pool: "WriterPool") -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._tasks: collections.deque[Task] = collections.deque()
        self._scheduled = False

    def submit(self, task: Task) -> None:
        """Queue a task behind the lane's others. A task must handle its own errors.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._lock:
            self._tasks.append(task)
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._pool.enqueue(self)
        except RuntimeError:
            with self._lock:
                self._tasks.pop()
                self._scheduled = False
            raise

    def run_one(self) -> bool:
        """Run the first task; True if more are waiting."""
        with self._lock:
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
                # daemons: a hanging disk must not keep the interpreter from ending; close() is the orderly way out
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Finish all tasks, then end the threads. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

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
