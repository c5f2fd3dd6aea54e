"""The way from the device to the host beside vLLM's own work: a stream, its events, pinned memory.

Apart from the tap so that its buffers can be tried against a device whose copies come late, without a GPU.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaSide", "Mark", "Side"]


class Mark(Protocol):
    """A moment in the order of a device's work; a torch.cuda.Event."""

    def record(self) -> None:
        """It is now: behind what was launched on the current stream."""

    def query(self) -> bool:
        """Whether it has come."""

    def synchronize(self) -> None:
        """Wait for it."""


class Side(Protocol):
    """What the tap needs of a device."""

    def mark(self, *, blocking: bool = False) -> Mark:
        """A new one; `blocking`: who waits for it sleeps."""

    def behind(self, mark: Mark) -> AbstractContextManager[None]:
        """What is launched inside goes to the side stream, behind a moment of the other one."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies of the side stream may fill."""

    def keep(self, tensor: Tensor) -> None:
        """Its memory mustn't be given away before what the side stream does with it is done."""


class CudaSide:
    """Of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self, *, blocking: bool = False) -> Mark:
        found: Mark = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def behind(self, mark: Mark) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)
