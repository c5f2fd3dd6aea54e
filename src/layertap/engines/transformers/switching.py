"""How soon a thread gets the interpreter's lock back, while extraction or generation runs on a GPU.

Each launch of a kernel drops the lock, and a writer thread that has taken it gives it back only after the switch interval: 5 ms by
default, in which hundreds of kernels could have been launched.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["QUICK_SWITCHES", "QuickSwitches"]

_SWITCH_SECONDS = 0.0005


class QuickSwitches:
    """The switch interval is short while somebody is inside; the last who leaves puts back what was there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, switches are quick."""
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_SECONDS)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    sys.setswitchinterval(self._before)


QUICK_SWITCHES = QuickSwitches()
