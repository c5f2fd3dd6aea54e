"""Waiting for what another thread does."""

import threading

_PAUSE_SECONDS = 0.02


def wait_until(condition, trouble, seconds=60):
    """Poll on an event that nobody sets; `trouble` says what it means when the time is over."""
    nothing = threading.Event()
    for _ in range(round(seconds / _PAUSE_SECONDS)):
        if condition():
            return
        nothing.wait(_PAUSE_SECONDS)
    raise AssertionError(trouble)
