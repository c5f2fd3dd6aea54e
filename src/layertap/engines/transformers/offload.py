"""Blocks whose weights stay in host memory and come to the device as they are needed.

Each block's tensors lie end to end in one pinned buffer, and its parameters are views of a buffer on the device that it shares
with other blocks, at the same places. So to bring a block is one large copy, parameters never move while blocks run (compiled
code is shared and stays valid), and copies run beside the computation (see `streaming`). Blocks for which there is room are
made resident: they get device memory of their own and leave the host's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layertap.engines.pinned import pinned_bytes
from layertap.engines.transformers.streaming import Lanes, Schedule
from layertap.errors import ModelError

__all__ = ["SLOTS", "Streamer", "flat_bytes", "spread"]

logger = logging.getLogger(__name__)

SLOTS = 3
"""One that is computed with, one that is ready, one that is being filled: copies then need to keep up on average only."""
_ALIGNMENT = 256
_CHUNK_BYTES = 64 * 2**20
"""Of one copy; between two of them the small copies of other streams get their turn."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies in its block's buffer."""

    parameter: nn.Parameter
    begin: int
    end: int
    shape: torch.Size
    dtype: torch.dtype


def flat_bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> int:
    """Size of a buffer for parameters, on any device, the meta device too.

    Args:
        parameters: of a block.
        dtype: of the floating-point parameters, where it isn't theirs yet.
    """
    sizes = (
        p.numel() * (dtype if dtype is not None and p.is_floating_point() else p.dtype).itemsize for p in parameters
    )
    return sum(_padded(size) for size in sizes)


def spread(count: int, total: int) -> frozenset[int]:
    """`count` of the numbers below `total`, as evenly apart as they can be."""
    return frozenset(i for i in range(total) if (i + 1) * count // total > i * count // total)


class Streamer:
    """The blocks of one model whose weights may be in host memory. Used by one thread at a time.

    Args:
        device: where the model runs. On the CPU everything works the same way, but copies are made when they are asked for.
        slot_bytes: size of the largest block.
    """

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._slot_bytes = slot_bytes
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._places: dict[int, list[_Place]] = {}
        self._host: dict[int, Tensor] = {}
        self._resident: dict[int, Tensor] = {}
        self._lanes: Lanes[Any] = (
            _CudaLanes(self._host, self._slots) if self._is_cuda else _CpuLanes(self._host, self._slots)
        )
        self._schedule: Schedule[Any] = Schedule({}, self._lanes)

    @property
    def streamed(self) -> int:
        """How many blocks come from the host."""
        return len(self._host)

    @property
    def block_bytes(self) -> int:
        """Device memory of one block."""
        return self._slot_bytes

    def adopt(self, index: int, block: nn.Module) -> None:
        """Take a block's weights into host memory; its parameters become views of a buffer of the device. `arrange` comes next.

        Raises:
            ModelError: there is no such host memory, or the weights aren't plain tensors.
        """
        places, begin = [], 0
        for name, parameter in block.named_parameters():
            if type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
                raise ModelError(
                    f"{name} of block {index} is a {type(parameter.data).__name__}: it can't be kept in host memory"
                )
            end = begin + parameter.numel() * parameter.dtype.itemsize
            places.append(_Place(parameter, begin, end, parameter.shape, parameter.dtype))
            begin += _padded(end - begin)
        if begin > self._slot_bytes:
            raise ModelError(
                f"block {index} has {begin} bytes of weights, the largest of its configuration {self._slot_bytes}"
            )
        host = _host_buffer(begin, self._is_cuda)
        for place in places:
            _view(host, place).copy_(place.parameter.data)
            place.parameter.data = _view(self._slots[index % SLOTS], place)
        for module in block.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        self._places[index], self._host[index] = places, host

    def arrange(self, resident: Collection[int] = ()) -> None:
        """Give blocks device memory of their own, for good, and divide the buffers among the rest. Nothing may run meanwhile.

        Args:
            resident: blocks to move to the device, beside those that are there.
        """
        self._synchronize()
        for index in sorted(resident):
            if index in self._host:
                self._resident[index] = self._host[index].to(self.device)
                self._point(index, self._resident[index])
                del self._host[index]
        slots = {index: place % SLOTS for place, index in enumerate(sorted(self._host))}
        for index, slot in slots.items():
            self._point(index, self._slots[slot])
        self._schedule = Schedule(slots, self._lanes)

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Let the blocks of a view say when they are entered and left. To be called after the tap's hooks are there, so that a
        block before which the forward ends isn't fetched."""
        for index, block in enumerate(blocks):
            if index in self._places:
                block.register_forward_pre_hook(self._entering(index))
                block.register_forward_hook(self._leaving(index))

    @contextlib.contextmanager
    def running(self, depth: int) -> Iterator[None]:
        """A forward through the blocks below `depth`."""
        self._schedule.begin(depth)
        try:
            yield
        finally:
            self._schedule.end()

    def seconds_per_copy(self) -> float:
        """How long the copy of one streamed block takes, measured."""
        index = min(self._host, default=None)
        if index is None:
            return 0.0
        self._synchronize()
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self._lanes.copy(index, 0, None)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        self.arrange()  # the first buffer holds another block now than the schedule knows of
        return min(seconds)

    def _entering(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._schedule.enter(index)

        return hook

    def _leaving(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._schedule.leave(index)

        return hook

    def _point(self, index: int, buffer: Tensor) -> None:
        for place in self._places[index]:
            place.parameter.data = _view(buffer, place)

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)


class _CpuLanes:
    """Nothing is asynchronous: what was asked for has happened."""

    def __init__(self, host: dict[int, Tensor], slots: Sequence[Tensor]) -> None:
        self._host = host
        self._slots = slots

    def copy(self, block: int, slot: int, after: None) -> None:
        source = self._host[block]
        self._slots[slot][: source.numel()].copy_(source)

    def wait(self, mark: None) -> None:
        pass

    def mark(self) -> None:
        pass


class _CudaLanes:
    """A side stream copies; marks are events."""

    def __init__(self, host: dict[int, Tensor], slots: Sequence[Tensor]) -> None:
        self._host = host
        self._slots = slots
        self._device = slots[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def copy(self, block: int, slot: int, after: torch.cuda.Event | None) -> torch.cuda.Event:
        source = self._host[block]
        target = self._slots[slot]
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for begin in range(0, source.numel(), _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, source.numel())
                target[begin:end].copy_(source[begin:end], non_blocking=True)
        arrival: torch.cuda.Event = self._stream.record_event()
        return arrival

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def mark(self) -> torch.cuda.Event:
        done: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return done


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(buffer: Tensor, place: _Place) -> Tensor:
    return buffer[place.begin : place.end].view(place.dtype).view(place.shape)


def _host_buffer(nbytes: int, pinned: bool) -> Tensor:
    """Host memory for a block.

    Raises:
        ModelError: there is none.
    """
    if not pinned or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    try:
        return torch.from_numpy(pinned_bytes(nbytes))
    except torch.OutOfMemoryError as exc:
        logger.info("%s: torch allocates it", exc)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as exc:
        raise ModelError(
            f"{nbytes} bytes of host memory can't be had for weights that don't fit the device: {exc}"
        ) from exc
