"""What a capturing request may read of vLLM's prefix cache, and which rows are kept for later ones. Knows no vLLM object.

A request may read as many leading blocks as have their rows on the host (or owe none): `readable`. Once vLLM has decided, `plan`
says which rows the workers deliver from their slots, behind the rows of the same step, and which rows of the step they keep. Kept
are blocks whose hash is known when their first row is computed, so those of prompts and of replays; blocks of generated tokens
aren't.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layertap.capture.request import CaptureSpec
from layertap.engines.vllm.messages import Fill, PrefixNews, Reuse
from layertap.engines.vllm.prefix_index import PrefixIndex
from layertap.engines.vllm.prefix_rows import slot_bytes

logger = logging.getLogger(__name__)


class Hashed(Protocol):
    """What is used of vLLM's request.

    Attributes:
        block_hashes: of its full blocks; each hash stands for everything up to the block's end, with LoRA, salt and images.
        num_prompt_tokens: tokens of the prompt.
    """

    block_hashes: Sequence[bytes]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request of a step: `count` tokens from position `computed` on; `fresh` where it starts, or starts again."""

    request_id: str
    computed: int
    count: int
    fresh: bool


@dataclass(slots=True)
class _Running:
    request: Hashed
    layers: tuple[int, ...]
    candidates: range
    handed: int = 0  # rows before this position were handed over
    pending: dict[int, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict)
    held: list[bytes] = field(default_factory=list)
    stale: bool = False


class PrefixPlan:
    """See the module.

    Args:
        limit_bytes: of the rows that are kept.
        cell_bytes: one row of one layer.
    """

    def __init__(self, limit_bytes: int, cell_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._cell_bytes = cell_bytes
        self._block_size = 0
        self._index = PrefixIndex(0)
        self._running: dict[str, _Running] = {}
        self._hits = self._misses = 0

    def admit(self, request_id: str, request: Hashed, spec: CaptureSpec) -> None:
        """A request that captures."""
        self._running[request_id] = _Running(request, spec.layers, spec.candidates)

    def set_block_size(self, block_size: int) -> None:
        """Tokens of a block hash; said before anything is asked."""
        if block_size != self._block_size:
            self._block_size = block_size
            self._index = PrefixIndex(self._limit_bytes // slot_bytes(block_size, self._cell_bytes))
            self.reset()

    def readable(self, request_id: str) -> int | None:
        """How many leading tokens the request may read from the prefix cache; None for any number."""
        running = self._running.get(request_id)
        if running is None or not running.candidates:
            return None
        size, hashes, owed = self._block_size, running.request.block_hashes, running.candidates
        reached = max(owed.start, running.handed)
        block = reached // size
        while block < len(hashes) and block * size < owed.stop and self._index.has(hashes[block], running.layers):
            block += 1
        return None if block * size >= owed.stop else max(reached, block * size)

    def plan(self, scheduled: Iterable[Scheduled]) -> PrefixNews | None:
        """What the workers do in this step; None for nothing."""
        found = [(step, running) for step in scheduled if (running := self._running.get(step.request_id)) is not None]
        if not self._block_size or not found:
            return None
        # first what is delivered, which pins it: what is kept may take the place of something else
        reuses = [reuse for step, running in found if step.fresh and (reuse := self._start(step, running)) is not None]
        fills = [fill for step, running in found for fill in self._fills(step, running)]
        for step, running in found:
            end = step.computed + step.count
            running.handed = max(running.handed, end)
            if end >= len(running.request.block_hashes) * self._block_size:
                self._release(running)
        if not reuses and not fills:
            return None
        return PrefixNews(
            block_size=self._block_size,
            num_slots=self._index.num_slots,
            cell_bytes=self._cell_bytes,
            fills=tuple(fills),
            reuses=tuple(reuses),
        )

    def finish(self, request_id: str) -> None:
        """The request ended."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self._release(running)

    def reset(self) -> None:
        """Forget all rows: vLLM's prefix cache was reset, for new weights perhaps, or workers lost some."""
        self._index.clear()
        for running in self._running.values():
            running.pending.clear()
            running.held.clear()
            running.handed = 0
            running.stale = True  # its next rows follow from what was computed before

    def counts(self) -> dict[str, float]:
        """For metrics."""
        return {
            "prefix_hits": self._hits,
            "prefix_misses": self._misses,
            "prefix_evictions": self._index.evicted,
            "prefix_bytes": self._index.used_slots * slot_bytes(self._block_size, self._cell_bytes),
        }

    def _start(self, step: Scheduled, running: _Running) -> Reuse | None:
        self._release(running)
        running.stale = False
        size, owed, request = self._block_size, running.candidates, running.request
        start, stop = max(owed.start, running.handed), min(step.computed, owed.stop)
        self._misses += max(0, min(owed.stop, request.num_prompt_tokens) - max(step.computed, start))
        if start >= stop:
            return None
        keys = request.block_hashes[start // size : -(-stop // size)]
        if not all(self._index.has(key, running.layers) for key in keys):
            logger.error("layertap: request %s read blocks whose rows aren't there", step.request_id)
            return None
        for key in keys:
            self._hold(running, key)
        self._hits += stop - start
        slots = tuple(self._index.slots(key, running.layers) for key in keys)
        return Reuse(request_id=step.request_id, start=start, stop=stop, slots=slots)

    def _fills(self, step: Scheduled, running: _Running) -> Iterable[Fill]:
        size, hashes, owed = self._block_size, running.request.block_hashes, running.candidates
        end = step.computed + step.count
        if running.stale:
            return
        for block in range(step.computed // size, min(-(-end // size), len(hashes))):
            start, key = block * size, hashes[block]
            if start >= step.computed and start >= owed.start and start + size <= owed.stop:
                self._hold(running, key)
                reserved = self._index.reserve(key, running.layers)
                if reserved:
                    running.pending[block] = (key, tuple(reserved))
                    yield Fill(request_id=step.request_id, start=start, slots=tuple(reserved.items()))
            if block in running.pending and end >= start + size:
                self._index.seal(*running.pending.pop(block))

    def _hold(self, running: _Running, key: bytes) -> None:
        self._index.pin(key)
        running.held.append(key)

    def _release(self, running: _Running) -> None:
        for key, layers in running.pending.values():
            self._index.cancel(key, layers)
        running.pending.clear()
        for key in reversed(running.held):  # a block is of no use without those before it
            self._index.unpin(key)
        running.held.clear()
