"""Where the rows of one capture go: a file on its way, or memory. Both keep the digest of each row as it is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from layertap.assembly import Piece
from layertap.capture.request import CaptureSpec
from layertap.errors import EngineError
from layertap.files import format as fmt
from layertap.files.publish import PendingFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished capture.

    Attributes:
        token_ids: int64 [rows]: the tokens whose rows were owed.
        info: what the file says of itself (also where there is no file).
        path: the published file, or None.
        rows: uint8 [rows, layers, bytes of a slot] when kept in memory, or None.
    """

    token_ids: NDArray[np.int64]
    info: fmt.FileInfo
    path: Path | None = None
    rows: NDArray[np.uint8] | None = None


class Sink(Protocol):
    """Calls come in order from one thread at a time."""

    def write(self, piece: Piece, input_ids: NDArray[np.int64], digests: NDArray[np.uint64] | None) -> None:
        """Store a piece; `input_ids` and `digests` (where known) are those of its rows."""

    def read_back(self, row: int) -> NDArray[np.uint8]:
        """A row that was stored, uint8 [layers, bytes of a slot]."""

    def read_slot(self, row: int, slot: int) -> NDArray[np.uint8]:
        """One layer of it, uint8 [bytes of a slot]."""

    def finish(self, first_row: int, token_ids: NDArray[np.int64], first_position: int, num_tokens: int,
               facts: Mapping[str, str]) -> Result:  # fmt: skip
        """Make rows `first_row` on, one per token id, the result."""

    def quarantine(self, reason: str, first_row: int, token_ids: NDArray[np.int64], first_position: int, num_tokens: int,
                   facts: Mapping[str, str]) -> Path | None:  # fmt: skip
        """Keep the same rows where no reader takes them for right; tell a reader why. None where only files are kept."""

    def fail(self, reason: str) -> None:
        """Drop everything; tell a reader why. Never raises."""

    def discard(self) -> None:
        """Drop everything without a word. Never raises."""


class FileSink:
    """Rows go to their place in a file that is published at the end."""

    def __init__(self, file: PendingFile, spec: CaptureSpec) -> None:
        self._file = file
        self._num_layers = len(spec.layers)
        size = len(spec.candidates)
        self._digests = np.zeros(size, np.uint64)
        self._digested = np.zeros(size, np.bool_)

    def write(self, piece: Piece, input_ids: NDArray[np.int64], digests: NDArray[np.uint64] | None) -> None:
        rows = slice(piece.row, piece.row + len(input_ids))
        data = np.ascontiguousarray(piece.data)
        whole = data.shape[1] == self._num_layers
        if whole and digests is not None:
            self._digests[rows] = digests
        elif whole:
            self._digests[rows] = fmt.row_digests(data.reshape(len(input_ids), -1), input_ids)
        self._file.write(piece.row, piece.first_slot, data)
        self._digested[rows] = whole

    def read_back(self, row: int) -> NDArray[np.uint8]:
        return self._file.read_back(row, 1).reshape(self._num_layers, -1)

    def read_slot(self, row: int, slot: int) -> NDArray[np.uint8]:
        return self._file.read_slot(row, slot)

    def finish(self, first_row: int, token_ids: NDArray[np.int64], first_position: int, num_tokens: int,
               facts: Mapping[str, str]) -> Result:  # fmt: skip
        info = self._file.publish(
            first_row=first_row,
            token_ids=token_ids,
            digests=self._all_digests(first_row, token_ids),
            first_position=first_position,
            num_tokens=num_tokens,
            facts=facts,
        )
        return Result(token_ids=token_ids, info=info, path=self._file.path)

    def quarantine(self, reason: str, first_row: int, token_ids: NDArray[np.int64], first_position: int, num_tokens: int,
                   facts: Mapping[str, str]) -> Path | None:  # fmt: skip
        return self._file.quarantine(
            reason,
            first_row=first_row,
            token_ids=token_ids,
            digests=self._all_digests(first_row, token_ids),
            first_position=first_position,
            num_tokens=num_tokens,
            facts=facts,
        )

    def _all_digests(self, first_row: int, token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        rows = slice(first_row, first_row + len(token_ids))
        # rows that came in parts, from pipeline stages
        for row in (np.flatnonzero(~self._digested[rows]) + first_row).tolist():
            token = token_ids[row - first_row : row - first_row + 1]
            self._digests[row] = fmt.row_digests(self._file.read_back(row, 1), token)[0]
        return self._digests[rows]

    def fail(self, reason: str) -> None:
        self._file.fail(reason)

    def discard(self) -> None:
        self._file.discard()


class MemorySink:
    """Rows are kept in memory; for prompts only, where the number of rows is known."""

    def __init__(self, spec: CaptureSpec, info: fmt.FileInfo) -> None:
        self._info = info
        self._shape = (len(spec.layers), spec.slot_bytes)
        self._rows = np.empty((len(spec.candidates), *self._shape), np.uint8)

    def write(self, piece: Piece, input_ids: NDArray[np.int64], digests: NDArray[np.uint64] | None) -> None:
        num_rows, num_slots, _ = piece.data.shape
        if num_rows != len(input_ids):
            raise EngineError(f"{num_rows} rows with {len(input_ids)} input ids")
        self._rows[piece.row : piece.row + num_rows, piece.first_slot : piece.first_slot + num_slots] = piece.data

    def read_back(self, row: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._rows[row]
        return found

    def read_slot(self, row: int, slot: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._rows[row, slot]
        return found

    def finish(self, first_row: int, token_ids: NDArray[np.int64], first_position: int, num_tokens: int,
               facts: Mapping[str, str]) -> Result:  # fmt: skip
        rows = self._rows[first_row : first_row + len(token_ids)]
        info = fmt.FileInfo(
            layers=self._info.layers,
            num_rows=len(token_ids),
            hidden_size=self._info.hidden_size,
            dtype=self._info.dtype,
            first_position=first_position,
            prompt_len=self._info.prompt_len,
            num_tokens=num_tokens,
            num_layers=self._info.num_layers,
            model=self._info.model,
            facts={**self._info.facts, **facts},
        )
        return Result(token_ids=token_ids, info=info, rows=rows)

    def quarantine(self, reason: str, first_row: int, token_ids: NDArray[np.int64], first_position: int, num_tokens: int,
                   facts: Mapping[str, str]) -> Path | None:  # fmt: skip
        self.fail(reason)
        return None

    def fail(self, reason: str) -> None:
        self._rows = np.empty((0, *self._shape), np.uint8)

    def discard(self) -> None:
        self.fail("")
