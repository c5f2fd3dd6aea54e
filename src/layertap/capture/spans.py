"""Half-open ranges of rows or positions, one after the other."""

from collections.abc import Iterable
from typing import TypeAlias

Spans: TypeAlias = tuple[tuple[int, int], ...]


def within(spans: Spans, begin: int, end: int) -> Spans:
    """The part of some rows that stands at places begin .. end - 1 of them."""
    found: list[tuple[int, int]] = []
    place = 0
    for start, stop in spans:
        first, last = max(begin - place, 0), min(end - place, stop - start)
        if first < last:
            found.append((start + first, start + last))
        place += stop - start
    return tuple(found)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same with as few ranges as can be, none of them empty."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
