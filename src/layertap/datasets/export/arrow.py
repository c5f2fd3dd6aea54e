"""A folder that `datasets.load_from_disk` opens, written with pyarrow alone.

OUT/data-00000-of-00001.arrow    record batches, a stream
OUT/dataset_info.json            the columns' types
OUT/state.json                   written last: without it the folder can't be opened
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from layertap.errors import OptionError

_NAME = "data-00000-of-00001.arrow"
_MOST_VALUES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column: how `datasets` describes it, and how Arrow stores it."""

    feature: Mapping[str, Any]
    type: pa.DataType
    metadata: Mapping[str, str] | None = None


def value(dtype: str) -> Column:
    """One value a row."""
    return Column({"dtype": dtype, "_type": "Value"}, _arrow_type(dtype))


def values(dtype: str, length: int | None = None) -> Column:
    """A list of values a row; of one length for all, if it is given."""
    feature: dict[str, Any] = {"feature": value(dtype).feature, "_type": "List"}
    if length is not None:
        feature["length"] = length
    return Column(feature, pa.list_(_arrow_type(dtype), -1 if length is None else length))


def array(shape: Sequence[int | None], dtype: str) -> Column:
    """An array of 2 or 3 axes a row; the first may differ from row to row (None)."""
    kind = f"Array{len(shape)}D"
    stored = _arrow_type(dtype)
    for _ in shape:
        stored = pa.list_(stored)
    metadata = {
        "ARROW:extension:name": f"datasets.features.features.{kind}ExtensionType",
        "ARROW:extension:metadata": json.dumps([list(shape), dtype]),
    }
    return Column({"shape": list(shape), "dtype": dtype, "_type": kind}, stored, metadata)


def nested(arrays: Sequence[NDArray[Any]]) -> pa.Array:
    """Arrays of the same number of axes, which differ in the first only, as one Arrow array of nested lists; copied once.

    Raises:
        OptionError: one batch can't hold so many values.
    """
    joined = np.concatenate(arrays)
    if joined.size > _MOST_VALUES:
        raise OptionError(f"a sample of {joined.size} values: Arrow's lists hold at most {_MOST_VALUES}")
    inner: pa.Array = pa.array(joined.reshape(-1))
    for length in reversed(joined.shape[1:]):
        offsets = np.arange(0, len(inner) + 1, length, dtype=np.int32)
        inner = pa.ListArray.from_arrays(offsets, inner)
    ends = np.cumsum([0, *(len(one) for one in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, inner)


def write_folder(
    out: Path,
    columns: Mapping[str, Column],
    batches: Iterable[Mapping[str, pa.Array]],
    *,
    fingerprint: str,
    torch_columns: bool = False,
    on_batch: Callable[[int], None] = lambda _rows: None,
) -> int:
    """Write the folder's files.

    Args:
        out: an existing folder.
        columns: by name.
        batches: rows, column by column.
        fingerprint: what the rows were made of; `datasets` keys its caches by a digest of it.
        torch_columns: reading gives tensors without `with_format`.
        on_batch: called with the number of rows so far.

    Returns:
        How many rows were written.
    """
    features = {name: column.feature for name, column in columns.items()}
    schema = pa.schema(
        [pa.field(name, column.type, metadata=column.metadata) for name, column in columns.items()],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    num_rows = 0
    with pa.OSFile(str(out / _NAME), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            stream.write_batch(pa.record_batch([batch[name] for name in columns], schema=schema))
            num_rows += len(next(iter(batch.values())))
            on_batch(num_rows)
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2))
    state: dict[str, Any] = {
        "_data_files": [{"filename": _NAME}],
        "_fingerprint": xxhash.xxh3_64_hexdigest(fingerprint.encode()),
        "_format_columns": list(columns) if torch_columns else None,
        "_format_kwargs": {},
        "_format_type": "torch" if torch_columns else None,
        "_output_all_columns": False,
        "_split": None,
    }
    (out / "state.json").write_text(json.dumps(state, indent=2))
    return num_rows


def _arrow_type(dtype: str) -> pa.DataType:
    return {"bool": pa.bool_(), "string": pa.string()}.get(dtype) or pa.from_numpy_dtype(np.dtype(dtype))
