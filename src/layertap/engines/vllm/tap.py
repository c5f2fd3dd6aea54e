"""The tap of one worker: maps and arena on the device, the op in the blocks, and the way of each step's rows to the host.

Per step: `begin` lays the batch out and fills the maps before the forward, the op scatters inside it, `end` sends the span to
the host on a side stream. A `Step` then goes to the collector's thread, which waits for the copy. Where nothing is captured the
maps say "skip" and nothing is copied. The op stamps each cell that it writes with the step's generation, and the stamps follow the
cells to the host: a cell with another stamp is left over from an earlier step, whatever the reason, and is never taken for a row.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from layertap.engines.vllm import ops
from layertap.engines.vllm.arena import Ring, Span
from layertap.engines.vllm.compat import Layout
from layertap.engines.vllm.looks import FinishedLooks, Looks, start_looks, works
from layertap.engines.vllm.residual import Rule
from layertap.engines.vllm.rowmap import SKIP, Chunk, PlanTable, Want, fill, lay_out
from layertap.engines.vllm.shared import SharedCells
from layertap.engines.vllm.side import CudaSide, Mark, Side
from layertap.engines.vllm.tapping import Entries, tap_input, tap_output

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
MOST_STEPS = 4
"""In the host ring: one that is copied, and as many as are written until the longest of their prompts is."""
_MOST_GENERATIONS = (1 << 31) - 1


@dataclass(slots=True, eq=False)
class Step:
    """The captured rows of one engine step, on their way to the host.

    Attributes:
        number: the scheduler's count.
        chunks: what belongs to whom; tokens count from the batch's first row.
        cells: uint8 [cells, bytes of a row]: valid after `wait`.
        release: gives the host memory back; to be called once.
        first_cell: of the step, in the host ring.
        stamps: int32 [cells], as the tap wrote them: valid after `wait`.
        generation: what they have to be.
        looks: what the device found out about the rows: valid after `wait`. None where the writer has to.
    """

    number: int
    chunks: list[Chunk]
    cells: NDArray[np.uint8]
    release: Callable[[], None]
    _positions_and_ids: torch.Tensor
    first_cell: int
    stamps: NDArray[np.int32]
    generation: int
    _copied: Mark | None = None
    looks: Looks | FinishedLooks | None = None

    def wait(self) -> None:
        """Wait for the copy from the device."""
        if self._copied is not None:
            self._copied.synchronize()

    def part(self, chunks: list[Chunk], release: Callable[[], None]) -> "Step":
        """The same step with some of its chunks."""
        return replace(self, chunks=chunks, release=release)

    def positions_and_ids(self) -> NDArray[np.int64]:
        """int64 [2, rows of the batch]; after `wait`."""
        array: NDArray[np.int64] = self._positions_and_ids.numpy()
        return array

    def unwritten(self) -> NDArray[np.bool_]:
        """For each cell whether the tap didn't write it in this step."""
        stale: NDArray[np.bool_] = self.stamps != self.generation
        return stale


@dataclass(slots=True)
class _Current:
    chunks: list[Chunk]
    span: Span
    num_cells: int
    positions_and_ids: torch.Tensor
    generation: int


@dataclass(slots=True)
class TapCounts:
    """For metrics."""

    steps: int = 0
    bytes_copied: int = 0


@dataclass(slots=True)
class _DeviceSide:
    """What only exists on an accelerator."""

    way: Side
    arena: torch.Tensor | None = None
    stamps: torch.Tensor | None = None
    pending: deque[tuple[Span, Mark]] = field(default_factory=deque)


class Tap:
    """See the module.

    Args:
        taps: layer id of each tap of this worker, in the order of the table's columns.
        hidden_size: width of a row.
        dtype: compute dtype.
        device: of the model.
        max_rows: most rows of a step, with padding.
        max_plans: most requests of a step.
        host_bytes: limit of the host ring; one step always fits, more than four aren't needed.
        side: the way to the host; by default that of the device, if it is none on its own.
    """

    def __init__(
        self,
        taps: tuple[int, ...],
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_plans: int,
        host_bytes: int,
        side: Side | None = None,
    ) -> None:
        ops.define()
        self.taps = taps
        self.dtype = dtype
        self.counts = TapCounts()
        self._hidden_size = hidden_size
        self._device = device
        self._max_rows = max_rows
        self._plans = PlanTable(max_plans, len(taps))
        self._destinations = torch.full((max_rows,), SKIP, dtype=torch.int32, device=device)
        self._plan_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._table = torch.full((max_plans, max(len(taps), 1)), SKIP, dtype=torch.int32, device=device)
        self._control = torch.zeros(ops.CONTROL_SIZE, dtype=torch.int64, device=device)
        self._generation = 0
        if side is None and device.type != "cpu":
            side = CudaSide(device)
        self.on_device = device.type != "cpu"
        self._staging = [
            torch.zeros((2, max_rows), dtype=torch.int32, pin_memory=self.on_device) for _ in range(_STAGING_BUFFERS)
        ]
        self._staging_events: list[Mark | None] = [None] * _STAGING_BUFFERS
        self._next_staging = 0
        self._dirty_rows = 0
        self._current: _Current | None = None
        self.cell_bytes = hidden_size * dtype.itemsize
        self.step_cells = max_rows * max(len(taps), 1)
        host_cells = max(self.step_cells, min(MOST_STEPS * self.step_cells, host_bytes // self.cell_bytes))
        self.cells = SharedCells(host_cells, self.cell_bytes)
        if self.on_device:
            self.cells.pin()
        self._host = self.cells.tensor(dtype)
        self._host_stamps = torch.from_numpy(self.cells.stamps)
        self._host_bytes = self.cells.array
        self.host_ring = Ring(host_cells)
        self._arena_ring = self.host_ring
        self._device_side: _DeviceSide | None = None
        self._looked_layers = 0
        """Only at rows of all taps: the kernel is compiled for a number of layers, which must not happen between steps."""
        if side is not None:
            self._device_side = _DeviceSide(side)
            self._arena_ring = Ring(2 * self.step_cells)
        else:
            self._bind(self._host, self._host_stamps)

    def install(self, blocks: Mapping[int, nn.Module], rule: Rule, entries: Mapping[int, Entries]) -> None:
        """Put the op into the blocks: id L behind block L - 1, or in front of block L where `entries` has it.

        Args:
            blocks: of this worker.
            rule: which output is the stream.
            entries: where hidden states and residual stand among the arguments of a block.
        """
        for column, layer in enumerate(self.taps):
            block = blocks[layer if layer in entries else layer - 1]
            for name, value in self._buffers().items():
                if name not in block._buffers:
                    block.register_buffer(name, value, persistent=False)
            if layer in entries:
                tap_input(block, column, *entries[layer])
            else:
                tap_output(block, column, rule)
        if self._device_side is not None and works(self._device, len(self.taps), self._hidden_size, self.dtype):
            self._looked_layers = len(self.taps)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            "layertap_destinations": self._destinations,
            "layertap_plans": self._plan_ids,
            "layertap_table": self._table,
            "layertap_control": self._control,
        }

    def reserve_arena(self) -> None:
        """Allocate the device arena now instead of with the first captured step."""
        side = self._device_side
        if side is None or side.arena is not None:
            return
        side.arena = torch.empty((self._arena_ring.capacity, self._hidden_size), dtype=self.dtype, device=self._device)
        side.stamps = torch.zeros(self._arena_ring.capacity, dtype=torch.int32, device=self._device)
        self._bind(side.arena, side.stamps)

    def _bind(self, arena: torch.Tensor, stamps: torch.Tensor) -> None:
        """Let the op write there."""
        if self.on_device:
            self._control[0] = arena.data_ptr()
            self._control[2] = stamps.data_ptr()
        else:
            self._control[0] = ops.register_cpu_arena(arena, stamps)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device arena."""
        return self._arena_ring.capacity * (self.cell_bytes + 4)

    def begin(self, layout: Layout, wants: Mapping[str, Want], slack: int = 0) -> None:
        """Fill the maps for the step that is about to run."""
        self.cancel()
        if not wants:
            return
        chunks, num_cells = lay_out(layout.request_ids, layout.query_starts, layout.computed, wants, self._plans, slack)
        if not num_cells:
            return
        self.reserve_arena()
        span = self._take_arena(num_cells)
        if span is None:
            raise RuntimeError("the tap is closed")
        try:
            self._fill_maps(chunks, span.start, layout.num_rows)
            self._generation = self._generation % _MOST_GENERATIONS + 1
            self._control[1].fill_(self._generation)
            self._current = _Current(chunks, span, num_cells, self._snapshot(layout), self._generation)
        except BaseException:
            self.skip()
            self._arena_ring.give_back(span)
            raise

    def skip(self) -> None:
        """Make the maps skip every row."""
        if self._dirty_rows:
            self._destinations[: self._dirty_rows].fill_(SKIP)
            self._dirty_rows = 0

    def cancel(self) -> None:
        """Forget a step that began but never ended (its forward failed)."""
        self.skip()
        if self._current is not None:
            self._arena_ring.give_back(self._current.span)
            self._current = None

    def end(self, number: int) -> Step | None:
        """After the forward was launched: send its rows to the host. None if it had none. May wait for room on the host."""
        self.skip()  # a dummy run may follow, and must not write into cells that are still being read
        current, self._current = self._current, None
        if current is None:
            return None
        self.counts.steps += 1
        self.counts.bytes_copied += current.num_cells * self.cell_bytes
        if self._device_side is None:
            span = current.span
            return Step(
                number,
                current.chunks,
                self._host_bytes[span.start : span.stop],
                lambda: self.host_ring.give_back(span),
                current.positions_and_ids,
                span.start,
                self.cells.stamps[span.start : span.stop],
                current.generation,
            )
        return self._copy_to_host(number, current, self._device_side)

    def close(self) -> None:
        """Wake whoever waits for room."""
        self.host_ring.close()
        self._arena_ring.close()
        if not self.on_device:
            ops.forget_cpu_arena(int(self._control[0]))
        self.cells.unpin()

    def _copy_to_host(self, number: int, current: _Current, side: _DeviceSide) -> Step:
        span = self.host_ring.take(current.num_cells)
        if span is None:
            self._arena_ring.give_back(current.span)
            raise RuntimeError("the tap is closed")
        computed = side.way.mark()
        computed.record()
        try:
            return self._launch_copy(number, current, span, computed, side)
        except BaseException:
            with contextlib.suppress(Exception):  # what was launched of it may still read and write there
                last = side.way.mark()
                with side.way.behind(computed):
                    last.record()
                last.synchronize()
            self.host_ring.give_back(span)
            self._arena_ring.give_back(current.span)
            raise

    def _launch_copy(self, number: int, current: _Current, span: Span, computed: Mark, side: _DeviceSide) -> Step:
        assert side.arena is not None
        assert side.stamps is not None
        way = side.way
        copied = way.mark(blocking=True)
        facts = way.pinned(tuple(current.positions_and_ids.shape), torch.int64)
        way.keep(current.positions_and_ids)
        cells = side.arena[current.span.start : current.span.stop]
        with way.behind(computed):
            looks = self._look(current, cells, way)
            self._host[span.start : span.stop].copy_(cells, non_blocking=True)
            # behind the cells: stamps that are there say that the cells are
            self._host_stamps[span.start : span.stop].copy_(
                side.stamps[current.span.start : current.span.stop], non_blocking=True
            )
            facts.copy_(current.positions_and_ids, non_blocking=True)
            copied.record()
        side.pending.append((current.span, copied))
        return Step(
            number,
            current.chunks,
            self._host_bytes[span.start : span.stop],
            lambda: self.host_ring.give_back(span),
            facts,
            span.start,
            self.cells.stamps[span.start : span.stop],
            current.generation,
            copied,
            looks,
        )

    def _look(self, current: _Current, cells: torch.Tensor, way: Side) -> Looks | None:
        """Have the device look at the rows, where that is worth it."""
        if not self._looked_layers:
            return None
        try:
            return start_looks(cells, current.chunks, self._looked_layers, current.positions_and_ids[1], way)
        except Exception:  # the writer can do it as well
            logger.exception(
                "layertap: the device can't compute digests any more; the writer computes them from now on"
            )
            self._looked_layers = 0
            return None

    def _take_arena(self, num_cells: int) -> Span | None:
        side = self._device_side
        if side is None:
            return self._arena_ring.take(num_cells)
        while side.pending and side.pending[0][1].query():
            self._arena_ring.give_back(side.pending.popleft()[0])
        while (span := self._arena_ring.try_take(num_cells)) is None:
            if not side.pending:
                raise RuntimeError(f"{num_cells} cells don't fit into the arena of {self._arena_ring.capacity}")
            oldest, copied = side.pending.popleft()
            copied.synchronize()
            self._arena_ring.give_back(oldest)
        return span

    def _fill_maps(self, chunks: list[Chunk], first_cell: int, num_rows: int) -> None:
        if num_rows > self._max_rows:
            raise RuntimeError(f"a step of {num_rows} rows, {self._max_rows} were announced")
        slot = self._next_staging
        self._next_staging = (slot + 1) % _STAGING_BUFFERS
        filled = self._staging_events[slot]
        if filled is not None:
            filled.synchronize()
        staging = self._staging[slot]
        array = staging.numpy()
        fill(array[0], array[1], chunks, first_cell, num_rows)
        self._dirty_rows = num_rows
        self._destinations[:num_rows].copy_(staging[0, :num_rows], non_blocking=True)
        self._plan_ids[:num_rows].copy_(staging[1, :num_rows], non_blocking=True)
        if self._plans.changed:  # rare: a set of layers that wasn't asked for lately
            self._table.copy_(torch.from_numpy(self._plans.table))
            self._plans.changed = False
        if self._device_side is not None:
            self._staging_events[slot] = mark = self._device_side.way.mark()
            mark.record()

    def _snapshot(self, layout: Layout) -> torch.Tensor:
        """The step's positions and input ids, before the next step's overwrite them."""
        snapshot = torch.empty((2, layout.num_rows), dtype=torch.int64, device=self._device)
        snapshot[0].copy_(layout.positions[: layout.num_rows])
        snapshot[1].copy_(layout.input_ids[: layout.num_rows])
        return snapshot
