"""When the weights of which block are copied to which device buffer, so that they are there in time and never change in use.

Blocks whose weights don't stay on the device share a few buffers there ("slots"), each block always the same one. `Schedule` says
when a copy may begin: after the last block that ran on that slot's weights, and as early as that allows. A forward goes through the
blocks in order and the next begins with the first block again, so the copies do. If a model runs them in another order, or ends
early, a block that isn't there is copied when it is entered: that costs time, never a wrong weight.

Nothing here knows a device: what is asynchronous about it is behind `Lanes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

__all__ = ["Lanes", "Schedule"]

M = TypeVar("M")


class Lanes(Protocol[M]):
    """A device with two lanes that run at the same time: one copies, one computes. A mark is a moment on one of them."""

    def copy(self, block: int, slot: int, after: M | None) -> M:
        """Copy a block's weights to a slot, behind all earlier copies and not before `after`; the mark is their arrival."""
        ...

    def wait(self, mark: M) -> None:
        """What is computed from now on comes after the mark."""
        ...

    def mark(self) -> M:
        """The moment when all that was computed so far is done."""
        ...


class Schedule(Generic[M]):
    """Keeps the slots filled ahead of a forward that reports the blocks it enters and leaves. Not thread-safe.

    Args:
        slots: the slot of each block whose weights are streamed.
        lanes: the device.
    """

    def __init__(self, slots: Mapping[int, int], lanes: Lanes[M]) -> None:
        self._slots = dict(slots)
        self._lanes = lanes
        self._held: dict[int, tuple[int, M]] = {}
        self._free: dict[int, M] = {}
        self._running: int | None = None
        self._order = sorted(slots)

    def begin(self, depth: int) -> None:
        """A forward through the blocks below `depth` begins."""
        self._order = [block for block in sorted(self._slots) if block < depth]
        self._look_ahead(0)

    def enter(self, block: int) -> None:
        """What is computed from now on may use the block's weights."""
        if self._running is not None:
            self._retire()
        if block not in self._slots:
            return
        self._fetch(block)
        self._lanes.wait(self._held[self._slots[block]][1])
        self._running = block

    def leave(self, block: int) -> None:
        """The block's weights aren't needed any more by what is computed from now on."""
        if self._running != block:
            return
        self._retire()
        if block in self._order:
            self._look_ahead(self._order.index(block) + 1)

    def end(self) -> None:
        """The forward has ended, inside of a block or not; the next one starts with the first block again."""
        if self._running is not None:
            self._retire()
        self._look_ahead(0)

    def _retire(self) -> None:
        assert self._running is not None
        self._free[self._slots[self._running]] = self._lanes.mark()
        self._running = None

    def _look_ahead(self, place: int) -> None:
        """Fetch the blocks from a place of the order on, round and round, until one of them needs the slot of an earlier one."""
        claimed: set[int] = set()
        for step in range(len(self._order)):
            block = self._order[(place + step) % len(self._order)]
            if self._slots[block] in claimed:
                return
            claimed.add(self._slots[block])
            self._fetch(block)

    def _fetch(self, block: int) -> None:
        slot = self._slots[block]
        if slot not in self._held or self._held[slot][0] != block:
            self._held[slot] = (block, self._lanes.copy(block, slot, self._free.get(slot)))
