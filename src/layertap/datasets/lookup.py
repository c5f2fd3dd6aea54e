"""Where each sample is: what reading needs of the index, in arrays, for millions of samples.

Reading hundreds of Parquet parts takes seconds. So a run that ends leaves all of it in one file, `lookup.safetensors`. It is
used as long as it matches the parts (names, sizes, and the ends of the files, where Parquet has the digests of all columns),
and is never needed: without it, or when anything about it is off, the parts are read.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from layertap.datasets.index import LOOKUP_COLUMNS, SPAN_COLUMNS, part_paths, read_part, span_arrays
from layertap.errors import CorruptError
from layertap.files.paths import temporary_path

CACHE_NAME = "lookup.safetensors"
_CACHE_VERSION = "2"
_END_BYTES = 4096
_ARRAYS = ("index", "file", "row", "tokens", "prompt_tokens", "part", "line")


@dataclass(frozen=True, slots=True)
class SpanColumn:
    """Spans of each sample."""

    offsets: NDArray[np.int64]
    """[samples + 1]: sample i has spans[offsets[i] : offsets[i + 1]]."""
    known: NDArray[np.bool_]
    """[samples]: false where the index has null."""
    spans: NDArray[np.int32]
    """[all spans, 2]"""

    def get(self, at: int) -> NDArray[np.int32] | None:
        """Return the spans [n, 2] of a sample, or None."""
        return self.spans[self.offsets[at] : self.offsets[at + 1]] if self.known[at] else None

    def lengths(self) -> NDArray[np.int64]:
        """How much the spans of each sample cover, [samples]."""
        ends = np.concatenate([[0], np.cumsum(self.spans[:, 1] - self.spans[:, 0], dtype=np.int64)])
        lengths: NDArray[np.int64] = ends[self.offsets[1:]] - ends[self.offsets[:-1]]
        return lengths


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
    loss_mask: SpanColumn
    positions: SpanColumn
    before: SpanColumn
    files: list[str]
    parts: list[Path]
    ids: list[str]
    """Of the data set that each part belongs to."""

    def __len__(self) -> int:
        return len(self.index)


def load_lookup(folder: Path, dataset_id: str, *, use_cache: bool = False) -> Lookup:
    """Read what is needed to find samples. An input that failed in one run and was done in a later one counts as done.

    Args:
        folder: the data set.
        dataset_id: its id.
        use_cache: take what the last run left in one file, if it matches the parts.

    Raises:
        CorruptError: a part is damaged, or a sample stands in the index twice.
        ForeignError: a part belongs to another set.
    """
    parts = part_paths(folder)
    if use_cache and (cached := _read_cache(folder, dataset_id, parts)) is not None:
        return cached
    return _read_parts(folder, dataset_id, parts)


def write_cache(folder: Path, dataset_id: str) -> None:
    """Leave the lookup of a set in one file, for fast opening.

    Raises:
        OSError: the disk's reason; the set is as good without it.
        HiddenStatesError: the index is damaged.
    """
    from safetensors.numpy import save

    parts = part_paths(folder)
    lookup = _read_parts(folder, dataset_id, parts)
    arrays: dict[str, NDArray[Any]] = {name: getattr(lookup, name) for name in _ARRAYS}
    for name in SPAN_COLUMNS:
        column: SpanColumn = getattr(lookup, name)
        arrays |= {
            f"{name}.offsets": column.offsets,
            f"{name}.known": column.known,
            f"{name}.spans": column.spans,
        }
    arrays["files"] = np.frombuffer("\n".join(lookup.files).encode(), np.uint8)
    facts = {"version": _CACHE_VERSION, "state": _state(folder, dataset_id, parts), "digest": _digest(arrays)}
    path = folder / CACHE_NAME
    temporary = temporary_path(path)
    try:
        # not save_file, which makes files that only their owner can read
        temporary.write_bytes(save({name: np.ascontiguousarray(one) for name, one in arrays.items()}, metadata=facts))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_cache(folder: Path, dataset_id: str, parts: list[Path]) -> Lookup | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / CACHE_NAME, "np") as file:
            facts = file.metadata() or {}
            if facts.get("version") != _CACHE_VERSION or facts.get("state") != _state(folder, dataset_id, parts):
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        if facts.get("digest") != _digest(arrays):
            return None
        names = arrays["files"].tobytes().decode()
        return Lookup(
            **{name: arrays[name] for name in _ARRAYS},
            **{name: _span_column(arrays, name) for name in SPAN_COLUMNS},  # type: ignore[arg-type]
            files=names.split("\n") if names else [],
            parts=parts,
            ids=[dataset_id] * len(parts),
        )
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _span_column(arrays: dict[str, NDArray[Any]], name: str) -> SpanColumn:
    return SpanColumn(arrays[f"{name}.offsets"], arrays[f"{name}.known"], arrays[f"{name}.spans"])


def _state(folder: Path, dataset_id: str, parts: list[Path]) -> str:
    """Say by what to know that the parts are the same: a copied folder has other times, but the same bytes."""
    state = xxhash.xxh3_128(dataset_id.encode())
    for path in parts:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = os.pread(file.fileno(), _END_BYTES, max(0, size - _END_BYTES))
        state.update(json.dumps([path.relative_to(folder).as_posix(), size]).encode())
        state.update(end)
    return str(state.hexdigest())


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name} {array.dtype.str} {array.shape};".encode())
        if array.size:
            state.update(array.reshape(-1).view(np.uint8).data)
    return str(state.hexdigest())


def _read_parts(folder: Path, dataset_id: str, parts: list[Path]) -> Lookup:
    files: dict[str, int] = {}
    blocks: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, np.int64)] for name in _ARRAYS}
    spans: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {name: [] for name in SPAN_COLUMNS}
    for number, path in enumerate(parts):
        table = read_part(path, dataset_id, LOOKUP_COLUMNS)
        if table.column("file").null_count:
            lines = np.flatnonzero(table.column("file").is_valid().to_numpy())
            table = table.take(pa.array(lines))
        else:
            lines = np.arange(len(table))
        names = table.column("file").combine_chunks().dictionary_encode()
        known = np.array([files.setdefault(name, len(files)) for name in names.dictionary.to_pylist()], np.int64)
        blocks["file"].append(known[names.indices.to_numpy(zero_copy_only=False)] if len(known) else known)
        for name in ("index", "row", "tokens", "prompt_tokens"):
            blocks[name].append(table.column(name).to_numpy())
        blocks["part"].append(np.full(len(lines), number))
        blocks["line"].append(lines)
        for name, found in spans.items():
            found.append(span_arrays(table.column(name)))
    joined, order = _sorted_arrays(blocks, parts, folder)
    columns = {name: _sorted_spans(found, order) for name, found in spans.items()}
    ids = [dataset_id] * len(parts)
    return Lookup(**joined, **columns, files=list(files), parts=parts, ids=ids)  # type: ignore[arg-type]


def join_lookups(lookups: Sequence[tuple[str, Lookup]], folder: Path) -> Lookup:
    """Join the lookups of several sets to one, sorted by input index.

    Args:
        lookups: the name of each set's folder, and its lookup.
        folder: what holds the folders.

    Raises:
        CorruptError: two sets have the same sample.
    """
    blocks: dict[str, list[NDArray[Any]]] = {name: [] for name in _ARRAYS}
    spans: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {name: [] for name in SPAN_COLUMNS}
    files: list[str] = []
    parts: list[Path] = []
    ids: list[str] = []
    for name, one in lookups:
        for column in _ARRAYS:
            shift = {"file": len(files), "part": len(parts)}.get(column, 0)
            blocks[column].append(getattr(one, column) + getattr(one, column).dtype.type(shift))
        for column, found in spans.items():
            known: SpanColumn = getattr(one, column)
            found.append((np.where(known.known, np.diff(known.offsets), -1), known.spans))
        files += [f"{name}/{file}" for file in one.files]
        parts += one.parts
        ids += one.ids
    joined, order = _sorted_arrays(blocks, parts, folder)
    columns = {name: _sorted_spans(found, order) for name, found in spans.items()}
    return Lookup(**joined, **columns, files=files, parts=parts, ids=ids)  # type: ignore[arg-type]


def _sorted_arrays(
    blocks: dict[str, list[NDArray[Any]]], parts: list[Path], folder: Path
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    joined = {name: np.concatenate(arrays) for name, arrays in blocks.items()}
    order = np.argsort(joined["index"], kind="stable")
    joined = {
        name: array[order].astype(np.int64 if name in ("index", "row") else np.int32) for name, array in joined.items()
    }
    twice = np.flatnonzero(joined["index"][1:] == joined["index"][:-1])
    if len(twice):
        at = int(twice[0])
        places = " and ".join(str(parts[joined["part"][line]].name) for line in (at, at + 1))
        raise CorruptError(f"{folder}: sample {joined['index'][at]} stands in the index twice ({places})")
    return joined, order


def _sorted_spans(found: list[tuple[NDArray[Any], NDArray[Any]]], order: NDArray[np.int64]) -> SpanColumn:
    counts = np.concatenate([np.empty(0, np.int32), *(counts for counts, _ in found)])
    spans = np.concatenate([np.empty((0, 2), np.int32), *(spans for _, spans in found)])
    known = counts >= 0
    counts = np.maximum(counts, 0)
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    offsets = np.concatenate([[0], np.cumsum(counts[order], dtype=np.int64)])
    # where each span of the sorted order stands in the order of the parts
    shift = np.repeat(starts[:-1][order] - offsets[:-1], counts[order])
    return SpanColumn(offsets, known[order], spans[shift + np.arange(offsets[-1])])
