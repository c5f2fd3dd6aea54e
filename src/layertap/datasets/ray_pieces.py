"""The work of a Ray run: which piece of the input is where, what was published, what has to be done again."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from layertap.datasets.inputs import Record

PIECE_RECORDS = 256
MOST_DEATHS = 2
"""A piece that was being computed when so many actors died is cut into single records, and a record that kills again fails."""


@dataclass(slots=True, eq=False)
class Piece:
    """Records of the input whose places share the quotient by `PIECE_RECORDS`."""

    records: list[Record]
    deaths: int = 0


@dataclass(slots=True)
class Holding:
    """What one actor was given and hasn't published."""

    queued: deque[Piece] = field(default_factory=deque)
    """Pieces that it runs or will run, in this order."""
    open: dict[int, Record] = field(default_factory=dict)
    """Records of all its pieces that no published part holds, by their place in the input."""


class Pieces:
    """Hands out pieces in the order of the input, those that were lost first.

    Args:
        records: what is to be done, in the order of the input.
        piece_records: how many places of the input a piece covers.
    """

    def __init__(self, records: Iterable[Record], piece_records: int = PIECE_RECORDS) -> None:
        self._fresh = _cut(records, piece_records)
        self._lost: deque[Piece] = deque()
        self._ended = False

    @property
    def pending(self) -> bool:
        """Whether there is, or may be, work that nobody has."""
        return bool(self._lost) or not self._ended

    def next(self) -> Piece | None:
        """The next piece, or None where there is none at the moment."""
        if self._lost:
            return self._lost.popleft()
        if self._ended:
            return None
        piece = next(self._fresh, None)
        self._ended = piece is None
        return piece

    def give(self, piece: Piece, holding: Holding) -> None:
        """Note that an actor has a piece."""
        holding.queued.append(piece)
        holding.open.update({record.index: record for record in piece.records})

    def take_back(self, holding: Holding) -> list[Record]:
        """The actor died: queue what it hadn't published; returns the records that are given up."""
        blamed = holding.queued[0] if holding.queued else None
        given_up: list[Record] = []
        if blamed is not None:
            left = [holding.open.pop(record.index) for record in blamed.records if record.index in holding.open]
            deaths = blamed.deaths + 1
            if deaths > MOST_DEATHS:
                given_up = left
            elif deaths == MOST_DEATHS:
                self._lost.extend(Piece([record], deaths) for record in left)
            elif left:
                self._lost.append(Piece(left, deaths))
        others = sorted(holding.open.values(), key=lambda record: record.index)
        self._lost.extend(_cut(others, PIECE_RECORDS))
        holding.queued.clear()
        holding.open.clear()
        return given_up


def _cut(records: Iterable[Record], piece_records: int) -> Iterator[Piece]:
    """Cut by the place in the input, so that a resumed run has the same pieces."""
    piece: Piece | None = None
    for record in records:
        if piece is not None and piece.records[0].index // piece_records != record.index // piece_records:
            yield piece
            piece = None
        if piece is None:
            piece = Piece([])
        piece.records.append(record)
    if piece is not None:
        yield piece
