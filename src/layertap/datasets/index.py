"""The index of a data set: one small Parquet file beside each shard, so that no big file is ever rewritten.

A part lists the samples of its shard (or of a span of single files) and the inputs that failed meanwhile. It is
published after what it lists: a sample counts as done when its part is there. Each column carries a digest in the
part's metadata, which is checked when the column is read; pages and footer of Parquet are not left to luck.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from layertap.capture.spans import Spans, joined
from layertap.errors import CorruptError, ForeignError

PART_SUFFIX = ".index.parquet"
_KEY = b"layertap.index"
FORMAT_VERSION = 1
SHARING_FORMAT_VERSION = 2
"""Of parts with a column `before`."""

SPANS = pa.list_(pa.struct([pa.field("start", pa.int32()), pa.field("end", pa.int32())]))
SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),  # place in the input
        pa.field("sample_id", pa.string()),  # the row's own id
        pa.field("file", pa.string()),  # relative to the folder; null: the sample failed
        pa.field("row", pa.int64(), nullable=False),  # first row in the file
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("source_hash", pa.string(), nullable=False),
        pa.field("checksum", pa.string()),  # over row digests and token ids
        pa.field("error", pa.string()),  # why the sample failed
        pa.field("loss_mask", SPANS),  # rows of trained tokens; null: the sample has no mask
        pa.field("positions", SPANS),  # positions of the rows; null: all, from 0
        pa.field(
            "before", SPANS
        ),  # rows of the file that are the sample's first ones; null: none. Only in parts that need it
    ]
)
SPAN_COLUMNS = ("loss_mask", "positions", "before")
LOOKUP_COLUMNS = ("index", "file", "row", "tokens", "prompt_tokens", *SPAN_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEntry:
    """One line of the index: where a sample is, or why it isn't."""

    index: int
    source_hash: str
    sample_id: str | None = None
    file: str | None = None
    row: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    finish_reason: str | None = None
    checksum: str | None = None
    error: str | None = None
    loss_mask: Spans | None = None
    """Half-open spans of rows whose tokens are trained; None: the sample has no mask."""
    positions: Spans | None = None
    """Half-open spans of the positions of the rows; None: all, from 0."""
    before: Spans | None = None
    """Half-open spans of rows of the file that are the sample's first ones; those from `row` on follow. None: none."""

    @property
    def own_tokens(self) -> int:
        """Rows that were stored for this sample."""
        return self.tokens - sum(end - start for start, end in self.before or ())

    @property
    def spans(self) -> Spans:
        """All rows of the sample in the file, in order."""
        return spans_of(self.row, self.tokens, self.before or ())


def spans_of(row: int, tokens: int, before: Spans) -> Spans:
    """The rows of a sample in its file: those that it shares, then its own."""
    own = tokens - sum(end - start for start, end in before)
    return joined((*before, (row, row + own))) or ((row, row),)


def encode_part(entries: Sequence[SampleEntry], dataset_id: str) -> bytes:
    """Return the bytes of a part."""
    columns: dict[str, list[Any]] = {
        name: [getattr(entry, name) for entry in entries] for name in SampleEntry.__dataclass_fields__
    }
    for name in ("sample_id", "error"):
        columns[name] = [None if text is None else _writable(text) for text in columns[name]]
    for name in SPAN_COLUMNS:
        columns[name] = [
            None if spans is None else [{"start": start, "end": end} for start, end in spans] for spans in columns[name]
        ]
    table = pa.table(columns, schema=SCHEMA)
    shares = any(entry.before is not None for entry in entries)
    if not shares:
        table = table.drop_columns(["before"])
    facts = {
        "format_version": SHARING_FORMAT_VERSION if shares else FORMAT_VERSION,
        "dataset": dataset_id,
        "samples": len(entries),
        "digests": {name: _digest(table.column(name)) for name in table.column_names},
    }
    buffer = BytesIO()
    pq.write_table(table.replace_schema_metadata({_KEY: json.dumps(facts).encode()}), buffer, compression="zstd")
    return buffer.getvalue()


def _writable(text: str) -> str:
    """JSON's escapes and file names can hold halves of surrogate pairs, which Parquet can't."""
    return text.encode(errors="backslashreplace").decode()


def read_part(path: Path, dataset_id: str, columns: Sequence[str] = tuple(SCHEMA.names)) -> pa.Table:
    """Read columns of a part and check them.

    Raises:
        CorruptError: the part is damaged.
        ForeignError: it belongs to another data set, or isn't a part of an index.
    """
    try:
        with (
            path.open("rb") as opened,
            pq.ParquetFile(opened, pre_buffer=False) as file,
        ):  # Arrow takes UTF-8 names only
            facts = json.loads((file.schema_arrow.metadata or {})[_KEY])
            if facts["format_version"] not in (FORMAT_VERSION, SHARING_FORMAT_VERSION):
                raise ForeignError(f"{path}: index of format version {facts['format_version']!r}")
            if facts["dataset"] != dataset_id:
                raise ForeignError(f"{path}: belongs to another data set (id {facts['dataset']}, not {dataset_id})")
            there = [name for name in columns if name != "before" or facts["format_version"] != FORMAT_VERSION]
            table = file.read(columns=there, use_threads=False)
        for name in there:
            if _digest(table.column(name)) != facts["digests"][name]:
                raise CorruptError(f"{path}: column {name!r} of the index doesn't match its digest")
    except KeyError as exc:
        raise ForeignError(f"{path}: not a part of an index: {exc} is missing") from exc
    except (pa.ArrowException, OSError, ValueError, TypeError) as exc:
        raise CorruptError(f"{path}: the index can't be read: {exc}") from exc
    if len(there) < len(columns):
        table = table.append_column(SCHEMA.field("before"), pa.nulls(len(table), SPANS))
    return table


def part_paths(folder: Path) -> list[Path]:
    """List the parts of a set, in a fixed order."""
    return sorted(path for path in folder.glob(f"*/*{PART_SUFFIX}") if not path.name.startswith("."))


def load_entries(path: Path, dataset_id: str) -> list[SampleEntry]:
    """Read one part in full."""
    names = list(SampleEntry.__dataclass_fields__)
    rows = read_part(path, dataset_id, names).to_pylist()
    for row in rows:
        for name in SPAN_COLUMNS:
            if row[name] is not None:
                row[name] = tuple((span["start"], span["end"]) for span in row[name])
    return [SampleEntry(**row) for row in rows]


def span_arrays(column: pa.ChunkedArray) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return a column of spans as arrays: how many each line has (-1: null), and [start, end] of all."""
    joined = column.combine_chunks()
    counts = joined.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    values = joined.flatten()
    ends = [values.field(name).to_numpy(zero_copy_only=False).astype(np.int32) for name in ("start", "end")]
    return counts, np.stack(ends, axis=1)


def _digest(column: pa.ChunkedArray) -> str:
    """Digest the values of a column, whatever its chunks and buffers look like."""
    if pa.types.is_integer(column.type) and column.null_count == 0:
        content = column.to_numpy().astype("<i8").tobytes()
    elif column.type == SPANS:
        counts, spans = span_arrays(column)
        content = counts.astype("<i8").tobytes() + spans.astype("<i8").tobytes()
    else:
        # each distinct value is spelled once: the names of files are few
        coded = column.combine_chunks().dictionary_encode()
        spelled = [json.dumps(value) for value in coded.dictionary.to_pylist()]
        codes = coded.indices.fill_null(len(spelled)).to_numpy(zero_copy_only=False).tolist()
        spelled.append("null")
        content = f"[{','.join([spelled[code] for code in codes])}]".encode()
    return str(xxhash.xxh3_128_hexdigest(content))
