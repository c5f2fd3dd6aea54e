"""Always-on checks of rows, cheap enough for every row: what they refuse can't be the output of a model (but for one case below).

- Not finite: a NaN or an infinity, in every value. Found by integer maxima, which run at memory speed in all dtypes: NaN and
  infinity have the largest exponent, so they are the largest bit patterns of either sign.
- Zero or repeated: above the embeddings, rows of different tokens are never zero, and never equal to their neighbour's, once
  some earlier row was different. (A run of tokens without an embedding of their own may be, at the very beginning.) Eight bytes
  of each row are kept; only rows that agree in those are read again and compared.
- Of another request: some rows of each request are remembered; the same bytes for another token are somebody else's rows, or
  those of two tokens that share an embedding (ids that the tokenizer never gives, say) behind the same beginning.

That a row is of the right token and there exactly once is the assembly's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from layertap.assembly import Piece
from layertap.capture.request import EXPONENT_BITS, FP8, FP8_TAIL_BYTES, SAVE_DTYPES, CaptureSpec
from layertap.errors import EngineError
from layertap.writing.seen import SeenRows

__all__ = ["MARK_BYTES", "FinalCheck", "RowChecks", "finite"]

MARK_BYTES = 8
"""At the beginning of each row of a layer. An engine that fills them with 0xFF before the forward, a NaN in every dtype, learns
of rows that nothing wrote."""
_UNWRITTEN = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_FEW_TOKENS = 4
_MOST_COMPARED = 256
_BLOCK_BYTES = 1 << 19
"""Looked at twice in turn: little enough that the second look finds it in the cache."""
_INTEGERS: dict[int, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]]]] = {
    1: (np.int8, np.uint8),
    2: (np.int16, np.uint16),
    4: (np.int32, np.uint32),
}


def finite(data: NDArray[np.uint8], dtype: str) -> bool:
    """Whether no value is a NaN or an infinity.

    Args:
        data: uint8 of any shape; fp8 slots on its last axis, where the dtype is that.
        dtype: of the saved rows.
    """
    if data.size == 0:
        return True
    if dtype == FP8:
        scales = np.ascontiguousarray(data[..., -FP8_TAIL_BYTES:-4])
        data = data[..., :-FP8_TAIL_BYTES]
        if not finite(scales, "float32"):
            return False
    else:
        data = np.ascontiguousarray(data).reshape(-1)
    exponent, itemsize = EXPONENT_BITS[dtype], SAVE_DTYPES[dtype]
    signed, unsigned = _INTEGERS[itemsize]
    sign = 1 << (8 * itemsize - 1)
    stride = max(1, _BLOCK_BYTES // data[0].nbytes)
    for begin in range(0, len(data), stride):
        block = data[begin : begin + stride]
        if block.view(signed).max() >= exponent or block.view(unsigned).max() >= sign | exponent:
            return False
    return True


_RANGES = {
    "float16": "float16 ends at 65504: take bfloat16 or float32",
    "bfloat16": "bfloat16 ends at 3.39e38: save float32; where the model itself computed in float16, load it with dtype bfloat16",
    "float32": "as the model computed them: if its dtype is float16, which ends at 65504, load it with bfloat16 or float32",
    FP8: "as the model computed them: if its dtype is float16, which ends at 65504, load it with bfloat16 or float32",
}
"""What may have been left, and what to do, by the dtype that is saved."""


Read: TypeAlias = Callable[[int, int], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class FinalCheck:
    """What an engine wants to see of stored rows before they are published.

    Attributes:
        positions: which rows.
        judge: gets them, uint8 [rows, layers, bytes of a slot]; returns the reason not to publish, or None. Called on a writer
            thread.
    """

    positions: range
    judge: Callable[[NDArray[np.uint8]], str | None]


class RowChecks:
    """The checks of one capture. Calls come in order from one thread at a time.

    Args:
        spec: what is owed.
        request_id: named to other requests.
        seen: rows of other requests.
    """

    def __init__(self, spec: CaptureSpec, request_id: str, seen: SeenRows) -> None:
        self._spec = spec
        self._request_id = request_id
        self._seen = seen
        # untouched pages of zeros cost nothing
        self._marks = np.zeros((len(spec.candidates), len(spec.layers)), np.uint64)
        self._broken: set[tuple[int, int]] = set()

    def look(self, piece: Piece, *, all_finite: bool = False) -> None:
        """See a piece on its way to the sink; `all_finite` where the engine has looked at every value itself."""
        num_rows, num_slots, slot_bytes = piece.data.shape
        marks = piece.data[:, :, :MARK_BYTES]
        if slot_bytes < MARK_BYTES:
            marks = np.zeros((num_rows, num_slots, MARK_BYTES), np.uint8)
            marks[:, :, :slot_bytes] = piece.data
        slots = slice(piece.first_slot, piece.first_slot + num_slots)
        self._marks[piece.row : piece.row + num_rows, slots] = marks.view(np.uint64)[:, :, 0]
        if self._broken:  # a replay may bring better ones
            self._broken -= {(piece.row + i, piece.first_slot + s) for i in range(num_rows) for s in range(num_slots)}
        if not all_finite and not finite(piece.data, self._spec.dtype):
            self._broken |= {
                (piece.row + i, piece.first_slot + s)
                for i in range(num_rows)
                for s in range(num_slots)
                if not finite(piece.data[i, s], self._spec.dtype)
            }

    def settle(self, first_row: int, token_ids: NDArray[np.int64], read: Read) -> None:
        """Judge the rows that are owed.

        Args:
            first_row: row of the first.
            token_ids: their tokens.
            read: gives a slot of a row that was stored, uint8 [bytes of a slot].

        Raises:
            EngineError: rows that no model gives.
        """
        if len(token_ids) == 0:
            return
        self._refuse_broken(first_row, len(token_ids))
        marks = self._marks[first_row : first_row + len(token_ids)]
        others = token_ids[1:] != token_ids[:-1]
        suspicious = (marks[1:] == marks[:-1]).any(axis=0) | (marks == 0).any(axis=0)
        for slot in np.flatnonzero(suspicious).tolist():
            self._refuse_repeated(slot, first_row, token_ids, others, read)
        self._refuse_foreign(first_row, token_ids, read)

    def _where(self, row: int, slot: int) -> str:
        return f"position {row + self._spec.candidates.start}, layer {self._spec.layers[slot]}"

    def _refuse_broken(self, first_row: int, num_rows: int) -> None:
        broken = [place for place in self._broken if first_row <= place[0] < first_row + num_rows]
        if broken:
            # the shallowest is where it began: what follows from it may spread to earlier positions, 0 * NaN being NaN
            first = min(broken, key=lambda place: (self._spec.layers[place[1]], place[0]))
            if self._marks[first] == _UNWRITTEN:
                raise EngineError(f"the tap didn't write the row at {self._where(*first)} in this batch")
            raise EngineError(
                f"{len(broken)} of {num_rows * len(self._spec.layers)} rows hold NaN or infinity, first at "
                f"{self._where(*first)} ({_RANGES[self._spec.dtype]})"
            )

    def _refuse_repeated(
        self,
        slot: int,
        first_row: int,
        token_ids: NDArray[np.int64],
        others: NDArray[np.bool_],
        read: Read,
    ) -> None:
        """Zero or repeated rows behind a different one; or nothing but one row for many tokens."""
        marks = self._marks[first_row : first_row + len(token_ids), slot]
        # rows from the first one on that isn't the same as row 0
        changed = np.flatnonzero(marks != marks[0])
        start = int(changed[0]) if changed.size else 0
        if not changed.size:
            if len(set(token_ids.tolist())) < _FEW_TOKENS:
                return
        elif self._spec.layers[slot] == 0:
            return  # tokens may share an embedding, also one of zeros
        zeros = (np.flatnonzero(marks[start:] == 0) + start).tolist()[:_MOST_COMPARED]
        zeros = [i for i in zeros if not read(first_row + i, slot).any()]
        if len({int(token_ids[i]) for i in zeros}) > 1:
            raise EngineError(f"{len(zeros)} rows are all zero, first at {self._where(first_row + zeros[0], slot)}")
        pairs = (np.flatnonzero((marks[1:] == marks[:-1]) & others) + 1).tolist()
        for i in [i for i in pairs if i > start][:_MOST_COMPARED]:
            if np.array_equal(read(first_row + i, slot), read(first_row + i - 1, slot)):
                raise EngineError(
                    f"the row at {self._where(first_row + i, slot)} is the same as the one before it, which is of another token"
                )

    def _refuse_foreign(self, first_row: int, token_ids: NDArray[np.int64], read: Read) -> None:
        layer = max(self._spec.layers)
        slot = self._spec.layers.index(layer)
        if layer == 0:
            return
        for i in {min(1, len(token_ids) - 1), len(token_ids) // 2, len(token_ids) - 1}:
            if first_row + i + self._spec.candidates.start == 0:
                continue  # the first token sees nothing but itself: tokens that share an embedding share this row
            other = self._seen.note(layer, read(first_row + i, slot), int(token_ids[i]), self._request_id)
            if other is not None:
                raise EngineError(
                    f"the row at {self._where(first_row + i, slot)} is byte for byte one of request {other}, which had another "
                    "token there (right only where both tokens have the same embedding)"
                )
