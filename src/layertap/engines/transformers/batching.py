"""Generation with many sequences in one packed forward: transformers' cache and scheduler, our loop, sampler and tap.

Prompts are fed in chunks beside sequences that already generate. When the cache is full the scheduler takes a sequence out and
feeds it again later from its first token; its rows then arrive a second time, which merging by position takes care of.
Prefixes aren't shared: every capture gets rows that were computed for it.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from layertap.capture.blocks import Blocks
from layertap.capture.request import CaptureSpec
from layertap.engines.transformers.internals import PagedRunner, Scheduled
from layertap.engines.transformers.row_tap import Chunk, RowTap
from layertap.engines.transformers.stepping import Choose, LiveSequence, Step
from layertap.errors import EngineError

__all__ = ["BatchedStepper", "kv_bytes_per_token"]

_MAX_IDLE_STEPS = 100


class BatchedStepper:
    """Continuous batching.

    Args:
        model: a view that nobody else uses; its attention is switched to the paged form.
        found: its blocks.
        kv_tokens: room of the cache.
        max_batch_tokens: tokens in one forward.
        max_sequences: sequences at once.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Blocks,
        *,
        kv_tokens: int,
        max_batch_tokens: int = 512,
        max_sequences: int = 8,
        page_size: int = 32,
    ) -> None:
        self.max_sequences = max_sequences
        self._runner = PagedRunner(
            model,
            num_pages=max(1, -(-kv_tokens // page_size)),
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_sequences,
        )
        self.capacity = self._runner.capacity
        self._tap = RowTap(model, found)
        self._sequences: dict[str, LiveSequence] = {}
        self._owed: dict[str, tuple[CaptureSpec, range]] = {}
        self._num_steps = 0
        self._idle_steps = 0

    def add(self, sequence: LiveSequence) -> None:
        """Take a sequence in."""
        self._sequences[sequence.key] = sequence
        if sequence.spec is not None:
            self._owed[sequence.key] = sequence.spec, sequence.spec.candidates
        self._runner.add(sequence.key, sequence.prompt_ids)

    def remove(self, key: str) -> None:
        """Let one go."""
        if self._sequences.pop(key, None) is not None:
            self._owed.pop(key, None)
            self._runner.remove(key)

    def step(self, choose: Choose) -> Step:
        """One packed forward."""
        step = Step()
        scheduled = self._runner.schedule()
        if not scheduled:
            self._idle_steps += 1
            if self._sequences and self._idle_steps > _MAX_IDLE_STEPS:
                raise EngineError("the scheduler of transformers' continuous batching has stopped making progress")
            return step
        self._idle_steps = 0
        self._num_steps += 1
        chunks = self._chunks(scheduled)
        self._tap.expect(chunks)
        sampling = [part.key for part in scheduled if part.samples]
        self._runner.forward(lambda logits: choose(sampling, logits))
        try:
            step.rows = self._tap.collect(self._num_steps)
        except EngineError as error:
            step.failed = {chunk.key: error for chunk in chunks}
            for key in step.failed:
                self.remove(key)
        return step

    def _chunks(self, scheduled: Sequence[Scheduled]) -> list[Chunk]:
        return [
            Chunk(part.key, *owed, part.offset, part.count, part.start)
            for part in scheduled
            if (owed := self._owed.get(part.key)) is not None
        ]

    def close(self) -> None:
        """Take the hooks off and free the cache."""
        self._tap.close()
        self._runner.close()


def kv_bytes_per_token(config: Any, itemsize: int) -> int:
    """Bytes of keys and values of one token in all layers, if every layer attends to everything."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * itemsize)
