"""A budget of bytes: rows in memory that are in no file yet."""

import threading
import time


class ByteBudget:
    """Bytes in flight, bounded. `acquire` waits, which is the back-pressure on the engine.

    It covers only rows that are on their way to a file, and those always drain, so waiting always makes progress. A piece
    larger than the whole budget passes when nothing else is in flight. Rows that lie in buffers of a fixed size don't count: who
    owns those makes the engine wait.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._condition = threading.Condition()
        self.in_flight_bytes = 0
        self.peak_bytes = 0
        self.waited_seconds = 0.0

    def acquire(self, num_bytes: int, taken: list[int]) -> None:
        """Take `num_bytes`, waiting until they fit; noted in `taken`, for who is interrupted on the way."""
        with self._condition:
            if not self._fits(num_bytes):
                began = time.monotonic()
                self._condition.wait_for(lambda: self._fits(num_bytes))
                self.waited_seconds += time.monotonic() - began
            self.peak_bytes = max(self.peak_bytes, self.in_flight_bytes + num_bytes)
            self.in_flight_bytes += num_bytes
            taken.append(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Give them back."""
        with self._condition:
            self.in_flight_bytes -= num_bytes
            self._condition.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return self.in_flight_bytes == 0 or self.in_flight_bytes + num_bytes <= self.limit_bytes
