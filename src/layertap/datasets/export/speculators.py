"""The format that speculators (0.9) trains from: `speculators train --data-path OUT`, with `--on-missing raise`.

    OUT/data-00000-of-00001.arrow, dataset_info.json, state.json    what `datasets.load_from_disk` reads
    OUT/hidden_states/hs_<i>.safetensors                            `hidden_states` [tokens, layers, hidden], `token_ids`

Its columns are `input_ids`, `loss_mask` (0 or 1 a token) and `seq_len`. The last layer is the verifier's last hidden state,
before the final norm; those before it are the draft model's input. The Arrow files are written last: without them an export
that was killed can't be taken for a whole one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from layertap.datasets.export import new_folder, refuse_gaps
from layertap.datasets.reader import Dataset
from layertap.datasets.shards import ShardWriter
from layertap.datasets.writer import file_info
from layertap.errors import OptionError

_ROWS_PER_BATCH = 1000
_COLUMNS = {"input_ids": "int64", "loss_mask": "int64", "seq_len": "int64"}


def export_speculators(dataset: Dataset, out: Path, on_sample: Callable[[int], None] = lambda _done: None) -> int:
    """Write a data set in the format of speculators.

    Args:
        dataset: with loss masks, and the model's last layer as the last of its layers.
        out: a new folder.
        on_sample: called with the number of samples that are done.

    Returns:
        How many samples were written.

    Raises:
        OptionError: the set lacks what the format needs, or the folder isn't empty.
        OSError: the disk's reason.
    """
    num_layers = dataset.manifest.rows.num_layers
    if len(dataset.layers) < 2 or dataset.layers[-1] != num_layers:
        raise OptionError(
            f"{dataset.folder}: has layers {list(dataset.layers)}; speculators takes the last of them as the model's last "
            f"hidden state, so the last has to be {num_layers} (such as --layers eagle3+last)"
        )
    refuse_gaps(dataset)
    for position in range(len(dataset)):
        if dataset.loss_mask(position) is None:
            raise OptionError(
                f"{dataset.folder}: sample {dataset.indices[position]} has no loss mask (it isn't a chat, or was extracted "
                "without); speculators trains by masks"
            )
    new_folder(out)
    (out / "hidden_states").mkdir()
    for position in range(len(dataset)):
        _write_rows(dataset, position, out.absolute() / "hidden_states" / f"hs_{position}.safetensors")
        on_sample(position + 1)
    _write_arrow(dataset, out)
    return len(dataset)


def _write_rows(dataset: Dataset, position: int, path: Path) -> None:
    rows, token_ids = dataset.raw(position)
    info = replace(file_info(dataset.manifest), prompt_len=dataset.entry(position).prompt_tokens)
    writer = ShardWriter(path, info, max_rows=len(token_ids), fsync=False)
    try:
        writer.append(rows, token_ids)
        writer.publish()
    finally:
        writer.discard()


def _write_arrow(dataset: Dataset, out: Path) -> None:
    """Write what `datasets.Dataset.save_to_disk` would, with the format set to torch."""
    features: dict[str, Any] = {
        name: {"dtype": dtype, "_type": "Value"}
        if name == "seq_len"
        else {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}
        for name, dtype in _COLUMNS.items()
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    lists = pa.list_(pa.int64())
    schema = pa.schema(
        [("input_ids", lists), ("loss_mask", lists), ("seq_len", pa.int64())],
        metadata=metadata,
    )
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(out / name), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for first in range(0, len(dataset), _ROWS_PER_BATCH):
            positions = range(first, min(first + _ROWS_PER_BATCH, len(dataset)))
            ids = [dataset.raw(position)[1] for position in positions]
            masks = [np.asarray(dataset.loss_mask(position), np.int64) for position in positions]
            lengths = [len(one) for one in ids]
            stream.write_table(
                pa.table([pa.array(ids, lists), pa.array(masks, lists), pa.array(lengths)], schema=schema)
            )
    (out / "dataset_info.json").write_text(
        json.dumps({"citation": "", "description": "", "features": features, "homepage": "", "license": ""}, indent=2)
    )
    state = {
        "_data_files": [{"filename": name}],
        "_fingerprint": xxhash.xxh3_64_hexdigest(dataset.manifest.id.encode()),
        "_format_columns": list(_COLUMNS),
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    (out / "state.json").write_text(json.dumps(state, indent=2))
