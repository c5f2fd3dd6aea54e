"""A folder for `datasets.load_from_disk`: a row a sample.

    index, id             place in the input, the record's own id (or null)
    input_ids, positions  lists of int64
    loss_mask             list of bool; null where the sample has no mask
    prompt_len            int64
    hidden_states         Array3D [tokens, layers, hidden]

Arrow has no bfloat16: such rows become float32, which holds each of their values exactly.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from layertap.datasets.export import as_numbers, new_folder
from layertap.datasets.export.arrow import array, nested, value, values, write_folder
from layertap.datasets.reader import Dataset, DatasetItem


def export_datasets(dataset: Dataset, out: Path, on_sample: Callable[[int], None] = lambda _done: None) -> int:
    """Write a data set for the `datasets` library.

    Args:
        dataset: any.
        out: a new folder.
        on_sample: called with the number of samples that are done.

    Returns:
        How many samples were written.

    Raises:
        OptionError: the folder isn't empty.
        OSError: the disk's reason.
    """
    dataset = as_numbers(dataset)
    new_folder(out)
    columns = {
        "index": value("int64"),
        "id": value("string"),
        "input_ids": values("int64"),
        "positions": values("int64"),
        "loss_mask": values("bool"),
        "prompt_len": value("int64"),
        "hidden_states": array((None, len(dataset.layers), dataset.hidden_size), arrow_dtype(dataset)),
    }
    return write_folder(out, columns, _rows(dataset), fingerprint=dataset.manifest.id, on_batch=on_sample)


def _rows(dataset: Dataset) -> Iterator[Mapping[str, pa.Array]]:
    # one sample a batch: Arrow's lists are counted by 32 bits a batch
    for position, item in enumerate(dataset):
        mask = item["loss_mask"]
        yield {
            "index": pa.array([item["index"]], pa.int64()),
            "id": pa.array([dataset.entry(position).sample_id], pa.string()),
            "input_ids": nested([item["token_ids"].numpy()]),
            "positions": nested([item["positions"].numpy()]),
            "loss_mask": pa.array([None if mask is None else mask.tolist()], pa.list_(pa.bool_())),
            "prompt_len": pa.array([item["prompt_len"]], pa.int64()),
            "hidden_states": nested([arrow_rows(item)]),
        }


def arrow_dtype(dataset: Dataset) -> str:
    """The dtype of a set's rows in Arrow."""
    return dataset.dtype if dataset.dtype in ("float16", "float32") else "float32"


def arrow_rows(item: DatasetItem) -> NDArray[Any]:
    """The rows of a sample [tokens, layers, hidden] in a dtype that Arrow has."""
    import torch

    states = item["hidden_states"]
    rows: NDArray[Any] = (states if states.dtype in (torch.float16, torch.float32) else states.float()).numpy()
    return rows
