"""Which beginning of a sample lies in a shard already, by its tokens.

A tree of tokens whose nodes are the rows of the shard: a row is known by the row before it and its token. So any two samples
share the rows of what they have in common, whatever comes behind it.
"""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from layertap.capture.spans import Spans, within

LEAST = 16
"""Fewer rows aren't worth that a sample lies in two pieces."""
_MOST_ROWS = 1 << 20  # some 100 bytes of memory each


class StoredRows:
    """The tree of one open shard."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._firsts: list[int] = []
        self._spans: list[Spans] = []
        """By the first row of its own, where each sample lies."""

    def find(self, token_ids: NDArray[np.int64]) -> Spans:
        """Return the rows of the longest beginning that is there, as half-open spans; none where it is too short."""
        row, length = -1, 0
        for token in token_ids.tolist():
            known = self._rows.get(_key(row, token))
            if known is None:
                break
            row, length = known, length + 1
        if length < min(LEAST, len(token_ids)) or not length:
            return ()
        # the sample that has this row for its own has all tokens before it, too
        return within(self._spans[bisect_right(self._firsts, row) - 1], 0, length)

    def add(self, token_ids: NDArray[np.int64], spans: Spans, own: int) -> None:
        """Remember a sample that lies in these rows, the last `own` of them its own."""
        if not own or len(self._rows) >= _MOST_ROWS:
            return
        self._firsts.append(spans[-1][1] - own)
        self._spans.append(spans)
        row = -1
        places = (place for begin, end in spans for place in range(begin, end))
        for token, place in zip(token_ids.tolist(), places, strict=True):
            row = self._rows.setdefault(_key(row, token), place)


def _key(row: int, token: int) -> int:
    return (row + 1) << 32 | token
