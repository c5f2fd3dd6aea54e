"""Waiting for what another thread does."""

import threading

_PAUSE_SECONDS = 0.02


def wait_until(condition, trouble, seconds=300):
    """Poll on an event that nobody sets; `trouble` says what it means when the time is over."""
    nothing = threading.Event()
    for _ in range(round(seconds / _PAUSE_SECONDS)):
        if condition():
            return
        nothing.wait(_PAUSE_SECONDS)
    raise AssertionError(trouble)


def wait_until_at_rest(server):
    """Until nothing runs and nothing is written: files are published, or their reasons are, a moment after the answer."""
    wait_until(server.state.is_at_rest, "the server doesn't come to rest")
