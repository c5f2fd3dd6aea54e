"""Which sequences run together: batches within a token budget, in about the order of the input.

A `Packer` holds a bounded look-ahead. Each batch starts with the sequence that has waited longest, so nothing starves and
results come roughly in order; the room that is left is filled from the look-ahead. Packed batches cost the sum of their
lengths, padded ones their longest length times their number, so those are filled with the sequences nearest in length. Shared
batches are packed ones in which a sequence costs only what the one before it doesn't have.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

__all__ = ["Batch", "Item", "Packer", "Way"]

T = TypeVar("T")
Way = Literal["packed", "shared", "padded", "alone"]

_LOOK_AHEAD_ITEMS = 512
_LOOK_AHEAD_BUDGETS = 4
_MOST_PADDING = 0.25
_MOST_SEEN = 8
"""Budgets of keys in a shared batch: what it has in common is copied for each sequence, one block at a time."""


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """One sequence to run.

    Attributes:
        value: what it is to the caller.
        length: tokens.
        group: only items of equal groups run together.
    """

    value: T
    length: int
    group: Hashable = None


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Sequences that run in one forward."""

    items: tuple[Item[T], ...]
    way: Way

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(item.length for item in self.items)


class Packer(Generic[T]):
    """Turns a stream of sequences into batches.

    Args:
        way: how sequences may share a forward.
        budget: most tokens of a shared forward, padding included. A longer sequence goes alone. It may be changed later; with a
            smaller one the packer looks as far ahead as with the first.
        max_together: longest sequence that may share a forward, None for any.
        overlap: how many tokens of a sequence needn't be run behind another one; for shared batches.
    """

    def __init__(
        self,
        way: Way,
        budget: int,
        max_together: int | None = None,
        overlap: Callable[[T, T], int] = lambda _one, _other: 0,
    ) -> None:
        self.way = way
        self.budget = budget
        self.max_together = max_together
        self._overlap = overlap
        self._waiting: list[Item[T]] = []
        self._tokens = 0
        self._first_budget = budget

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether looking further ahead would buy little."""
        tokens = _LOOK_AHEAD_BUDGETS * max(self.budget, self._first_budget)
        return len(self._waiting) >= _LOOK_AHEAD_ITEMS or self._tokens >= tokens

    def push(self, item: Item[T]) -> None:
        """Add a sequence to the look-ahead."""
        self._waiting.append(item)
        self._tokens += item.length

    def longest_first(self) -> None:
        """No more will come: end with short sequences, whose files are soon written. Shared ones stay in order."""
        if self.way != "shared":
            self._waiting.sort(key=lambda item: item.length, reverse=True)

    def pop(self) -> Batch[T]:
        """Take the next batch; there must be a waiting sequence."""
        first = self._waiting[0]
        if self.way == "alone" or self._goes_alone(first):
            chosen = [0]
        elif self.way in ("packed", "shared"):
            chosen = self._fill_packed(first)
        else:
            chosen = self._fill_padded(first)
        taken = set(chosen)
        items = tuple(self._waiting[i] for i in chosen)
        self._waiting = [item for i, item in enumerate(self._waiting) if i not in taken]
        self._tokens -= sum(item.length for item in items)
        # A lone sequence of a packable model goes the packed way too, unless the self-test vouches for shorter ones only.
        packs = self.way in ("packed", "shared")
        way: Way = "packed" if packs and not self._too_long_for_company(first) else "alone"
        way = self.way if len(items) > 1 else way
        return Batch(items, way)

    def _goes_alone(self, item: Item[T]) -> bool:
        return item.length > self.budget or self._too_long_for_company(item)

    def _too_long_for_company(self, item: Item[T]) -> bool:
        return self.max_together is not None and item.length > self.max_together

    def _partners(self, first: Item[T]) -> Iterator[int]:
        for i, item in enumerate(self._waiting):
            if i and item.group == first.group and not self._goes_alone(item):
                yield i

    def _fill_packed(self, first: Item[T]) -> list[int]:
        chosen, left, seen = [0], self.budget - first.length, first.length
        for i in self._partners(first):
            item = self._waiting[i]
            cost = item.length
            if self.way == "shared" and left:
                cost -= self._overlap(self._waiting[chosen[-1]].value, item.value)
            if cost <= left and seen + item.length <= _MOST_SEEN * self.budget:
                chosen.append(i)
                left -= cost
                seen += item.length
        return chosen

    def _fill_padded(self, first: Item[T]) -> list[int]:
        chosen, longest, tokens = [0], first.length, first.length
        for i in sorted(self._partners(first), key=lambda i: abs(self._waiting[i].length - first.length)):
            new_longest, new_tokens = max(longest, self._waiting[i].length), tokens + self._waiting[i].length
            area = new_longest * (len(chosen) + 1)
            if area <= self.budget and area - new_tokens <= _MOST_PADDING * area:
                chosen.append(i)
                longest, tokens = new_longest, new_tokens
        return sorted(chosen)
