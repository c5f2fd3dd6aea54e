"""Cached activations as SAELens (6) reads them: `cached_activations_path=OUT`, with `hook_name`, `context_size` and `d_in`.

A folder for `datasets.load_from_disk`, a row for each `context_size` tokens:

    blocks.<L>.hook_resid_pre     Array2D [context_size, hidden]: layer L, which enters block L
    blocks.<n-1>.hook_resid_post  layer n, the output of the last block before the final norm
    token_ids                     int32 [context_size]

Samples stand end to end and are cut every `context_size` tokens, so a row may hold the end of one and the start of the next;
each state has seen the tokens of its own sample only. What is left at the end and doesn't fill a row is left out and counted.
Arrow has no bfloat16: such rows become float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from layertap.datasets.export import as_numbers, new_folder
from layertap.datasets.export.arrow import Column, array, nested, values, write_folder
from layertap.datasets.export.huggingface import arrow_dtype, arrow_rows
from layertap.datasets.reader import Dataset
from layertap.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedActivations:
    """What was written."""

    hook_names: tuple[str, ...]
    context_size: int
    num_rows: int
    num_left_out: int
    """Tokens at the end that didn't fill a row."""


def export_saelens(
    dataset: Dataset, out: Path, context_size: int = 128, on_sample: Callable[[int], None] = lambda _done: None
) -> CachedActivations:
    """Write a data set as cached activations, all of its layers as hooks.

    Args:
        dataset: any.
        out: a new folder.
        context_size: tokens a row.
        on_sample: called with the number of samples that are done.

    Raises:
        OptionError: the set has less tokens than one row takes, or the folder isn't empty.
        OSError: the disk's reason.
    """
    if context_size < 1:
        raise OptionError(f"context_size: expected at least 1, got {context_size}")
    num_rows, num_left_out = divmod(dataset.num_tokens, context_size)
    if not num_rows:
        raise OptionError(
            f"context_size: {context_size} tokens a row, but the data set has {dataset.num_tokens} in all"
        )
    dataset = as_numbers(dataset)
    new_folder(out)
    names = tuple(hook_name(layer, dataset.manifest.rows.num_layers) for layer in dataset.layers)
    shape = (context_size, dataset.hidden_size)
    columns: dict[str, Column] = {name: array(shape, arrow_dtype(dataset)) for name in names}
    columns["token_ids"] = values("int32", context_size)
    batches = _batches(dataset, names, context_size, on_sample)
    write_folder(out, columns, batches, fingerprint=f"{dataset.manifest.id} {context_size}")
    return CachedActivations(hook_names=names, context_size=context_size, num_rows=num_rows, num_left_out=num_left_out)


def hook_name(layer: int, num_layers: int) -> str:
    """TransformerLens' name for a layer."""
    return f"blocks.{layer - 1}.hook_resid_post" if layer == num_layers else f"blocks.{layer}.hook_resid_pre"


def _batches(
    dataset: Dataset, names: tuple[str, ...], context_size: int, on_sample: Callable[[int], None]
) -> Iterator[Mapping[str, pa.Array]]:
    dtype = np.dtype(arrow_dtype(dataset))
    states = np.empty((0, len(names), dataset.hidden_size), dtype)
    ids = np.empty(0, np.int64)
    for position, item in enumerate(dataset):
        states = np.concatenate([states, arrow_rows(item)])
        ids = np.concatenate([ids, item["token_ids"].numpy()])
        whole = len(ids) // context_size * context_size
        on_sample(position + 1)
        if not whole:
            continue
        batch: dict[str, pa.Array] = {
            name: nested(list(states[:whole, slot].reshape(-1, context_size, dataset.hidden_size)))
            for slot, name in enumerate(names)
        }
        batch["token_ids"] = pa.FixedSizeListArray.from_arrays(pa.array(ids[:whole].astype(np.int32)), context_size)
        yield batch
        states, ids = states[whole:], ids[whole:]
