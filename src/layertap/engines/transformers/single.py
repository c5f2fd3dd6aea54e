"""Generation one sequence at a time, as the model's own `generate` would run it: for models that can't be batched.

Several sequences are in progress at once, each with its own cache, and take turns: one forward each.
"""

from torch import Tensor, nn

from layertap.capture.blocks import Blocks
from layertap.engines.transformers.internals import OneSequence
from layertap.engines.transformers.row_tap import Chunk, RowTap
from layertap.engines.transformers.stepping import Choose, LiveSequence, Step

__all__ = ["SingleStepper"]


class SingleStepper:
    """One forward for one sequence at a time.

    Args:
        model: a view that nobody else uses.
        found: its blocks.
        use_cache: false feeds the whole sequence again for every token.
        max_sequences: sequences at once; each holds a cache.
        max_len: the longest sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Blocks,
        *,
        use_cache: bool = True,
        max_sequences: int = 4,
        max_len: int = 2**31,
    ) -> None:
        self.max_sequences = max_sequences
        self.capacity = max_len
        self._model = model
        self._use_cache = use_cache
        self._tap = RowTap(model, found)
        self._turns: dict[str, tuple[LiveSequence, OneSequence | None]] = {}
        self._num_steps = 0

    def add(self, sequence: LiveSequence) -> None:
        """Take a sequence in."""
        self._turns[sequence.key] = (sequence, None)

    def remove(self, key: str) -> None:
        """Let one go."""
        self._turns.pop(key, None)

    def step(self, choose: Choose) -> Step:
        """One forward for the sequence whose turn it is."""
        step = Step()
        if not self._turns:
            return step
        key = next(iter(self._turns))
        sequence, state = self._turns.pop(key)
        self._num_steps += 1
        try:
            if state is None:
                state = OneSequence(
                    self._model, sequence.prompt_ids, max_len=sequence.max_len, use_cache=self._use_cache
                )
            logits = self._forward(sequence, state)
            step.rows = self._tap.collect(self._num_steps)
        except Exception as error:  # noqa: BLE001 - it is this sequence's failure, the others go on
            self._tap.expect([])
            step.failed[key] = error
            return step
        token_id = choose([key], logits)[0]
        if token_id >= 0:
            state.append(token_id)
        self._turns[key] = (sequence, state)
        return step

    def _forward(self, sequence: LiveSequence, state: OneSequence) -> Tensor:
        inputs, count, start = state.prepare()
        spec = sequence.spec
        self._tap.expect([] if spec is None else [Chunk(sequence.key, spec, spec.candidates, 0, count, start)])
        outputs = self._model(**inputs, return_dict=True)
        state.take(outputs)
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def close(self) -> None:
        """Take the hooks off and free the caches."""
        self._tap.close()
        self._turns.clear()
