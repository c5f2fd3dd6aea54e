"""The format that speculators (0.9) trains from: `speculators train --data-path OUT`, with `--on-missing raise`.

    OUT/data-00000-of-00001.arrow, dataset_info.json, state.json    what `datasets.load_from_disk` reads
    OUT/hidden_states/hs_<i>.safetensors                            `hidden_states` [tokens, layers, hidden], `token_ids`

Its columns are `input_ids`, `loss_mask` (0 or 1 a token) and `seq_len`. The last layer is the verifier's last hidden state,
before the final norm; those before it are the draft model's input. The Arrow files are written last: without them an export
that was killed can't be taken for a whole one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from layertap.capture.request import FP8
from layertap.datasets.export import new_folder, refuse_undraftable
from layertap.datasets.export.arrow import nested, value, values, write_folder
from layertap.datasets.reader import Dataset
from layertap.datasets.shards import ShardWriter
from layertap.datasets.writer import file_info
from layertap.files.values import to_tensors

_ROWS_PER_BATCH = 1000
_COLUMNS = {"input_ids": values("int64"), "loss_mask": values("int64"), "seq_len": value("int64")}


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
    refuse_undraftable(dataset, "speculators")
    new_folder(out)
    (out / "hidden_states").mkdir()
    for position in range(len(dataset)):
        _write_rows(dataset, position, out.absolute() / "hidden_states" / f"hs_{position}.safetensors")
        on_sample(position + 1)
    _write_arrow(dataset, out)
    return len(dataset)


def _write_rows(dataset: Dataset, position: int, path: Path) -> None:
    rows, token_ids = dataset.raw(position)
    info = replace(file_info(dataset.manifest), packed=None, prompt_len=dataset.entry(position).prompt_tokens)
    if dataset.dtype == FP8:  # its reader knows no scales
        slots = rows.reshape(len(rows), len(dataset.layers), -1)
        rows = to_tensors(slots, FP8, "bfloat16")["hidden_states"].view(torch.uint8).numpy().reshape(len(rows), -1)
        info = replace(info, dtype="bfloat16")
    writer = ShardWriter(path, info, max_rows=len(token_ids), fsync=False)
    try:
        writer.append(rows, token_ids)
        writer.publish()
    finally:
        writer.discard()


def _write_arrow(dataset: Dataset, out: Path) -> None:
    """Write what `datasets.Dataset.save_to_disk` would, with the format set to torch."""
    write_folder(out, _COLUMNS, _batches(dataset), fingerprint=dataset.manifest.id, torch_columns=True)


def _batches(dataset: Dataset) -> Iterator[Mapping[str, pa.Array]]:
    for first in range(0, len(dataset), _ROWS_PER_BATCH):
        positions = range(first, min(first + _ROWS_PER_BATCH, len(dataset)))
        ids = [dataset.raw(position)[1] for position in positions]
        masks = [np.asarray(dataset.loss_mask(position), np.int64) for position in positions]
        yield {
            "input_ids": nested(ids),
            "loss_mask": nested(masks),
            "seq_len": pa.array([len(one) for one in ids], pa.int64()),
        }
