"""NumPy files, a sample each: `OUT/<index>.npz` with `hidden_states`, `token_ids`, `positions` and, for chats, `loss_mask`.

NumPy has no bfloat16 and no fp8: such rows become float32 (fp8: values times scale).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from layertap.datasets.export import new_folder
from layertap.datasets.reader import Dataset
from layertap.files.values import to_float32


def export_numpy(dataset: Dataset, out: Path, on_sample: Callable[[int], None] = lambda _done: None) -> int:
    """Write a data set as NumPy files.

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
    new_folder(out)
    shape = (-1, len(dataset.layers), dataset.hidden_size)
    for position in range(len(dataset)):
        raw, token_ids = dataset.raw(position)
        if dataset.dtype not in ("float32", "float16"):
            rows: Any = to_float32(raw.reshape(len(raw), len(dataset.layers), -1), dataset.dtype)
        else:
            rows = raw.view(dataset.dtype).reshape(shape)
        arrays = {"hidden_states": rows, "token_ids": token_ids, "positions": dataset.positions(position)}
        mask = dataset.loss_mask(position)
        if mask is not None:
            arrays["loss_mask"] = mask
        path = out / f"{dataset.indices[position]:09d}.npz"
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
        temporary.replace(path)
        on_sample(position + 1)
    return len(dataset)
