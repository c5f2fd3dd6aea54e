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

from layertap.errors import CorruptError, ForeignError

PART_SUFFIX = ".index.parquet"
_KEY = b"layertap.index"
FORMAT_VERSION = 1

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
        pa.field("loss_mask", SPANS),  # reserved: half-open spans of trained tokens
        pa.field("positions", SPANS),  # reserved: spans of kept rows, where not all were kept
    ]
)
LOOKUP_COLUMNS = ("index", "file", "row", "tokens", "prompt_tokens")


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


def encode_part(entries: Sequence[SampleEntry], dataset_id: str) -> bytes:
    """Return the bytes of a part."""
    columns: dict[str, list[Any]] = {
        name: [getattr(entry, name) for entry in entries] for name in SampleEntry.__dataclass_fields__
    }
    nothing = [None] * len(entries)
    table = pa.table({**columns, "loss_mask": nothing, "positions": nothing}, schema=SCHEMA)
    facts = {
        "format_version": FORMAT_VERSION,
        "dataset": dataset_id,
        "samples": len(entries),
        "digests": {name: _digest(table.column(name)) for name in table.column_names},
    }
    buffer = BytesIO()
    pq.write_table(table.replace_schema_metadata({_KEY: json.dumps(facts).encode()}), buffer, compression="zstd")
    return buffer.getvalue()


def read_part(path: Path, dataset_id: str, columns: Sequence[str] = tuple(SCHEMA.names)) -> pa.Table:
    """Read columns of a part and check them.

    Raises:
        CorruptError: the part is damaged.
        ForeignError: it belongs to another data set, or isn't a part of an index.
    """
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            facts = json.loads((file.schema_arrow.metadata or {})[_KEY])
            if facts["format_version"] != FORMAT_VERSION:
                raise ForeignError(f"{path}: index of format version {facts['format_version']!r}")
            if facts["dataset"] != dataset_id:
                raise ForeignError(f"{path}: belongs to another data set (id {facts['dataset']}, not {dataset_id})")
            table = file.read(columns=list(columns), use_threads=False)
        for name in columns:
            if _digest(table.column(name)) != facts["digests"][name]:
                raise CorruptError(f"{path}: column {name!r} of the index doesn't match its digest")
    except KeyError as exc:
        raise ForeignError(f"{path}: not a part of an index: {exc} is missing") from exc
    except (pa.ArrowException, OSError, ValueError, TypeError) as exc:
        raise CorruptError(f"{path}: the index can't be read: {exc}") from exc
    return table


def part_paths(folder: Path) -> list[Path]:
    """List the parts of a set, in a fixed order."""
    return sorted(path for path in folder.glob(f"*/*{PART_SUFFIX}") if not path.name.startswith("."))


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where each sample is, sorted by input index; columns of equal length."""

    index: NDArray[np.int64]
    file: NDArray[np.int32]
    """A number in `files`."""
    row: NDArray[np.int64]
    tokens: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    part: NDArray[np.int32]
    """A number in `parts`."""
    line: NDArray[np.int32]
    """The line in that part."""
    files: list[str]
    parts: list[Path]

    def __len__(self) -> int:
        return len(self.index)


def load_lookup(folder: Path, dataset_id: str) -> Lookup:
    """Read what is needed to find samples. An input that failed in one run and was done in a later one counts as done.

    Raises:
        CorruptError: a part is damaged, or a sample stands in the index twice.
        ForeignError: a part belongs to another set.
    """
    parts = part_paths(folder)
    files: dict[str, int] = {}
    blocks: dict[str, list[NDArray[Any]]] = {name: [] for name in (*LOOKUP_COLUMNS, "part", "line")}
    for number, path in enumerate(parts):
        table = read_part(path, dataset_id, LOOKUP_COLUMNS)
        names = table.column("file").combine_chunks().dictionary_encode()
        codes = names.indices.to_numpy(zero_copy_only=False)
        done = np.flatnonzero(table.column("file").is_valid().to_numpy())
        known = np.array([files.setdefault(name, len(files)) for name in names.dictionary.to_pylist()], np.int32)
        blocks["file"].append(known[codes[done].astype(np.int64)] if len(done) else np.empty(0, np.int32))
        for name in ("index", "row", "tokens", "prompt_tokens"):
            blocks[name].append(table.column(name).to_numpy()[done])
        blocks["part"].append(np.full(len(done), number, np.int32))
        blocks["line"].append(done.astype(np.int32))
    joined = {name: np.concatenate(arrays) if arrays else np.empty(0, np.int64) for name, arrays in blocks.items()}
    order = np.argsort(joined["index"], kind="stable")
    joined = {name: array[order] for name, array in joined.items()}
    twice = np.flatnonzero(joined["index"][1:] == joined["index"][:-1])
    if len(twice):
        at = int(twice[0])
        places = " and ".join(str(parts[joined["part"][line]].name) for line in (at, at + 1))
        raise CorruptError(f"{folder}: sample {joined['index'][at]} stands in the index twice ({places})")
    return Lookup(**joined, files=list(files), parts=parts)  # type: ignore[arg-type]


def load_entries(path: Path, dataset_id: str) -> list[SampleEntry]:
    """Read one part in full."""
    names = list(SampleEntry.__dataclass_fields__)
    return [SampleEntry(**row) for row in read_part(path, dataset_id, names).to_pylist()]


def _digest(column: pa.ChunkedArray) -> str:
    """Digest the values of a column, whatever its chunks and buffers look like."""
    if pa.types.is_integer(column.type) and column.null_count == 0:
        content = column.to_numpy().astype("<i8").tobytes()
    else:
        content = json.dumps(column.to_pylist(), separators=(",", ":")).encode()
    return str(xxhash.xxh3_128_hexdigest(content))
