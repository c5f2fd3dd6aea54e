"""Ctrl-C: the first one asks the run to end in good order, the second one ends it at once."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class GracefulStop:
    """While active, SIGINT and SIGTERM set `requested`; a second one raises KeyboardInterrupt.

    Args:
        announce: gets a message for the user at the first signal.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.requested = False
        self._announce = announce
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._announce("stopping: the prompts that are running are finished first; once more to drop them")
