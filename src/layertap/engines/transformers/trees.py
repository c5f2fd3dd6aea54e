"""Sequences that begin alike in one packed row: what they have in common stands in it once.

The row holds of each sequence only what the one before it didn't have: a tree, written down branch by branch. Behind a branch the
tokens see the rows of its trunk as their keys, so nothing is computed twice, and no cache is kept from one forward to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layertap.capture.spans import Spans, joined, within
from layertap.engines.base import TokenIds

__all__ = ["Tree", "overlap"]

LEAST = 16
"""Fewer common tokens are computed again."""


def overlap(one: TokenIds, other: TokenIds) -> int:
    """How many tokens of `other` needn't be run behind `one`: those that they have in common, but at least its last one is run."""
    most = min(len(one), len(other) - 1)
    differs = np.asarray(one[:most]) != np.asarray(other[:most])
    common = int(differs.argmax()) if differs.any() else most
    return common if common >= LEAST else 0


@dataclass(frozen=True, slots=True)
class Tree:
    """Where the tokens of sequences are in a packed row.

    Attributes:
        own: the positions of each sequence that are run for it; they stand in the row one after the other.
        rows: the rows that hold all positions of each, in order.
    """

    own: tuple[range, ...]
    rows: tuple[Spans, ...]

    @classmethod
    def of(cls, sequences: Sequence[TokenIds]) -> Tree:
        """Share what each sequence has in common with the one before it. Sorted ones share most."""
        own: list[range] = []
        rows: list[Spans] = []
        num_rows = 0
        for number, sequence in enumerate(sequences):
            common = overlap(sequences[number - 1], sequence) if number else 0
            before = within(rows[-1], 0, common) if common else ()
            own.append(range(common, len(sequence)))
            end = num_rows + len(sequence) - common
            rows.append(joined((*before, (num_rows, end))))
            num_rows = end
        return cls(tuple(own), tuple(rows))

    @property
    def num_rows(self) -> int:
        """Tokens that are run."""
        return sum(map(len, self.own))
