"""What the two ways of generating have in common: sequences go in, each step feeds some of them and asks for tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from layertap.assembly import Rows
from layertap.capture.request import CaptureSpec

__all__ = ["Choose", "LiveSequence", "Step", "Stepper"]

Choose = Callable[[Sequence[str], Tensor], list[int]]
"""Gets the keys of sequences and their logits [sequences, vocab], gives each its next token."""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that is being generated.

    Attributes:
        key: its name in the stepper.
        prompt_ids: the prompt.
        max_len: tokens at most.
        spec: whose rows are owed, None if nobody's.
    """

    key: str
    prompt_ids: list[int]
    max_len: int
    spec: CaptureSpec | None


@dataclass(slots=True)
class Step:
    """What one step gave, beside the tokens that went through `choose`.

    Attributes:
        rows: hidden states, by key.
        failed: sequences that can't go on, with the reason; they were removed.
    """

    rows: list[tuple[str, Rows]] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)


class Stepper(Protocol):
    """A way of generating."""

    max_sequences: int
    """How many sequences may be inside at once."""
    capacity: int
    """How many tokens one sequence can have."""

    def add(self, sequence: LiveSequence) -> None:
        """Take a sequence in."""

    def remove(self, key: str) -> None:
        """Let one go, finished or not."""

    def step(self, choose: Choose) -> Step:
        """Feed some of the sequences. An exception means that none of them can go on."""

    def close(self) -> None:
        """Free what is held."""
