"""Memory for the rows of the steps in flight: a ring of cells, one cell = one row of one layer.

The tap writes into a device arena, whose address stands in a control tensor: so it can be allocated after vLLM has sized its KV
cache, while compiled graphs and CUDA graphs keep working. On the CPU the arena is the host ring itself.
"""

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Span:
    """Cells `start .. stop - 1` of a ring."""

    start: int
    stop: int
    freed: bool = False


class Ring:
    """Hands out contiguous spans in order and takes them back in any order. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._spans: deque[Span] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def try_take(self, size: int) -> Span | None:
        """A span of `size` cells, or None if there is no room now."""
        with self._changed:
            return self._place(size)

    def take(self, size: int) -> Span | None:
        """A span of `size` cells; waits for room. None once the ring is closed."""
        if size > self.capacity:
            raise ValueError(f"{size} cells don't fit into a ring of {self.capacity}")
        with self._changed:
            while True:
                if self._closed:
                    return None
                span = self._place(size)
                if span is not None:
                    return span
                self._changed.wait()

    def give_back(self, span: Span) -> None:
        """Mark a span as free again."""
        with self._changed:
            span.freed = True
            while self._spans and self._spans[0].freed:
                self._spans.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Cells in spans that are out."""
        with self._changed:
            return sum(span.stop - span.start for span in self._spans if not span.freed)

    def _place(self, size: int) -> Span | None:
        if size > self.capacity:
            return None
        if not self._spans:
            start = 0
        else:
            oldest, newest = self._spans[0].start, self._spans[-1].stop
            if newest > oldest:
                if newest + size <= self.capacity:
                    start = newest
                elif size <= oldest:  # a ring that is full has spans, an empty one has none: the two stay distinct
                    start = 0
                else:
                    return None
            elif newest + size <= oldest:
                start = newest
            else:
                return None
        span = Span(start, start + size)
        self._spans.append(span)
        return span
