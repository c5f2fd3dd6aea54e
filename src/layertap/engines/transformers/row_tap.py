"""The tap of generation: hooks on the blocks copy the rows that somebody is owed, and nothing else.

Before a forward the stepper says which rows of the packed row belong to which capture. The hooks of the layers that are
asked for copy those rows into one buffer per kind of capture; after the forward each capture gets its slice, together with
the input ids that the model was really fed (taken from the call, not from our books: that is what makes the check in the
assembly worth something). A hook never raises; what went wrong is kept and fails the captures of that step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layertap.assembly import Rows
from layertap.capture.blocks import Blocks
from layertap.capture.request import CaptureSpec
from layertap.engines.fp8 import put, storage
from layertap.engines.ranges import numbers
from layertap.engines.transformers.copies import to_device
from layertap.errors import EngineError

__all__ = ["Chunk", "RowSink", "RowTap"]


class RowSink(Protocol):
    """Where the rows of one sequence go."""

    @property
    def spec(self) -> CaptureSpec:
        """What is owed."""

    def add(self, rows: Rows) -> None:
        """Take a chunk."""


@dataclass(slots=True)  # not frozen: a step makes hundreds
class Chunk:
    """Rows of one sequence in the next forward.

    Attributes:
        key: whose rows.
        spec: what is owed.
        candidates: of the spec.
        offset: the first row in the packed row.
        count: how many rows.
        start: absolute position of the first.
    """

    key: str
    spec: CaptureSpec
    candidates: range
    offset: int
    count: int
    start: int

    def owed(self) -> "Chunk | None":
        """The part whose rows may be owed."""
        first, stop = self.candidates.start, self.candidates.stop
        begin, end = self.start, self.start + self.count
        if first <= begin and end <= stop:
            return self
        begin, end = max(begin, first), min(end, stop)
        if begin >= end:
            return None
        return replace(self, offset=self.offset + begin - self.start, count=end - begin, start=begin)


@dataclass(slots=True)
class _Group:
    """Chunks that want the same layers in the same dtype share one buffer [rows, layers, hidden]."""

    layers: tuple[int, ...]
    dtype: str
    chunks: list[Chunk] = field(default_factory=list)
    index: slice | Tensor | None = None
    buffer: Tensor | None = None
    num_filled: int = 0

    def fill(self, hidden_TH: Tensor, slot: int) -> None:
        rows = self._rows(hidden_TH)
        if self.buffer is None:
            dtype, width = storage(self.dtype, hidden_TH.shape[1])
            self.buffer = torch.empty((rows.shape[0], len(self.layers), width), dtype=dtype, device=rows.device)
        put(self.buffer[:, slot], rows)
        self.num_filled += 1

    def _rows(self, hidden_TH: Tensor) -> Tensor:
        if self.index is None:
            offsets, counts = np.array([(chunk.offset, chunk.count) for chunk in self.chunks]).T
            ends = offsets + counts
            if int(ends.max()) > hidden_TH.shape[0]:
                raise EngineError(
                    f"rows up to {int(ends.max())} were expected in a forward of {hidden_TH.shape[0]} tokens"
                )
            if np.array_equal(offsets[1:], ends[:-1]):
                self.index = slice(int(offsets[0]), int(ends[-1]))
            else:
                self.index = to_device(torch.from_numpy(numbers(offsets, counts)), hidden_TH.device)
        return hidden_TH[self.index]


class RowTap:
    """Hooks on a model's blocks, shared by everything that generates with it.

    Args:
        model: the module whose forward is called.
        found: its blocks, and how they carry the stream.
    """

    def __init__(self, model: nn.Module, found: Blocks) -> None:
        self._found = found
        self._groups: list[_Group] = []
        self._wanted: dict[int, list[tuple[_Group, int]]] = {}
        self._next_layer = 0
        self._fed: Tensor | None = None
        self._fed_host: Tensor | None = None
        self._host: list[Tensor] = []
        self._ready: torch.Event | None = None
        self.error: str | None = None
        last = found.num_layers
        self._handles = [
            model.register_forward_pre_hook(self._on_start, with_kwargs=True),
            model.register_forward_hook(self._on_end),
            found.blocks[-1].register_forward_hook(
                lambda _module, _args, out: self._on_stream(last, lambda: found.leaving(out))
            ),
        ]
        for layer, block in enumerate(found.blocks):
            self._handles.append(block.register_forward_pre_hook(self._entering(layer), with_kwargs=True))

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Say which rows of the next forward are wanted."""
        groups: dict[tuple[tuple[int, ...], str], _Group] = {}
        for chunk in chunks:
            wanted = chunk.owed()
            if wanted is not None:
                kind = (chunk.spec.layers, chunk.spec.dtype)
                group = groups.get(kind)
                if group is None:
                    group = groups[kind] = _Group(*kind)
                group.chunks.append(wanted)
        self._groups = list(groups.values())
        self._wanted = {}
        for group in self._groups:
            for slot, layer in enumerate(group.layers):
                self._wanted.setdefault(layer, []).append((group, slot))
        self._next_layer = 0
        self._fed = self._fed_host = self._ready = None
        self._host = []
        self.error = None

    def collect(self, step: int) -> list[tuple[str, Rows]]:
        """The rows of the forward that just ran.

        Raises:
            EngineError: a hook failed or didn't run.
        """
        groups, self._groups = self._groups, []
        if not groups:
            return []
        if self.error is None and (self._fed_host is None or len(self._host) != len(groups)):
            self.error = "the model ran without passing its blocks"
        if self.error is not None:
            raise EngineError(f"hidden states couldn't be taken: {self.error}")
        if self._ready is not None:
            self._ready.synchronize()
        assert self._fed_host is not None
        fed = self._fed_host.numpy()
        found: list[tuple[str, Rows]] = []
        for group, host in zip(groups, self._host, strict=True):
            data = _as_bytes(host)
            begin = 0
            for chunk in group.chunks:
                ids = fed[chunk.offset : chunk.offset + chunk.count]
                rows = data[begin : begin + chunk.count]
                found.append((chunk.key, Rows(step, chunk.start, ids, slice(0, len(group.layers)), rows)))
                begin += chunk.count
        self._host = []
        return found

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _guarded(self, work: Callable[[], None]) -> None:
        if not self._groups or self.error is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a hook that raises would end everybody's forward
            self.error = f"{type(error).__name__}: {error}"

    def _on_start(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        def work() -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._fed = ids.reshape(-1).to(torch.int64, copy=True)

        self._guarded(work)

    def _entering(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if self._groups:
                self._on_stream(layer, lambda: self._found.entering(args, kwargs))

        return hook

    def _on_stream(self, layer: int, stream: Callable[[], Tensor]) -> None:
        def work() -> None:
            # A block that isn't run on this input is entered by what enters the next one.
            passed = range(self._next_layer, layer + 1)
            if not passed or self._fed is None:
                raise EngineError(f"block {layer} ran out of turn")
            self._next_layer = layer + 1
            wanted = [place for i in passed for place in self._wanted.get(i, ())]
            if not wanted:
                return
            hidden_TH = stream().detach().flatten(0, -2)
            if hidden_TH.shape[0] != self._fed.numel():
                raise EngineError(f"a block carries {hidden_TH.shape[0]} rows for {self._fed.numel()} tokens")
            for group, slot in wanted:
                group.fill(hidden_TH, slot)

        self._guarded(work)

    def _on_end(self, _module: nn.Module, _args: tuple[Any, ...], _out: Any) -> None:
        def work() -> None:
            assert self._fed is not None
            if any(group.num_filled != len(group.layers) for group in self._groups):
                raise EngineError(f"the forward ended after layer {self._next_layer - 1}, deeper ones were asked for")
            self._fed_host = _to_host(self._fed)
            self._host = [_to_host(group.buffer) for group in self._groups if group.buffer is not None]
            if self._fed.device.type != "cpu":
                self._ready = torch.Event(self._fed.device)
                self._ready.record(torch.accelerator.current_stream(self._fed.device.index))

        self._guarded(work)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def _as_bytes(host_NLH: Tensor) -> NDArray[np.uint8]:
    result: NDArray[np.uint8] = host_NLH.view(torch.uint8).numpy()
    return result
