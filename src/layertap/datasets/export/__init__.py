"""Data sets for other trainers, one module a format."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layertap.capture.request import FP8
from layertap.datasets.reader import Dataset
from layertap.errors import OptionError

if TYPE_CHECKING:
    import torch


def new_folder(out: Path) -> None:
    """Make the folder of an export.

    Raises:
        OptionError: it holds something already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise OptionError(f"{out}: the folder isn't empty; an export needs a new or empty one")


def as_numbers(dataset: Dataset) -> Dataset:
    """The set with rows that stand for themselves: other formats know no scales."""
    return dataset.read_as("bfloat16") if dataset.dtype == FP8 else dataset


def refuse_gaps(dataset: Dataset) -> None:
    """Refuse a set that holds rows of some positions only, for formats that have no place for positions.

    Raises:
        OptionError: it does.
    """
    kept = dataset.manifest.rows.options.get("positions", "all")
    if kept != "all":
        what = "trained positions only" if kept == "trained" else "rows that begin at later positions"
        raise OptionError(
            f"{dataset.folder}: holds {what}, and this format needs the rows of all; extract with positions 'all'"
        )


def refuse_undraftable(dataset: Dataset, trainer: str) -> None:
    """Refuse a set that a trainer of draft models can't take: it needs masks, all positions and the last layer as the last.

    Raises:
        OptionError: something is missing.
    """
    num_layers = dataset.manifest.rows.num_layers
    if len(dataset.layers) < 2 or dataset.layers[-1] != num_layers:
        raise OptionError(
            f"{dataset.folder}: has layers {list(dataset.layers)}; {trainer} takes the last of them as the model's last "
            f"hidden state, so the last has to be {num_layers} (such as --layers eagle3+last)"
        )
    refuse_gaps(dataset)
    for position in range(len(dataset)):
        if dataset.loss_mask(position) is None:
            raise OptionError(
                f"{dataset.folder}: sample {dataset.indices[position]} has no loss mask (it isn't a chat, or was extracted "
                f"without); {trainer} trains by masks"
            )


def save_record(record: Mapping[str, "torch.Tensor | str | bool"], path: Path) -> None:
    """`torch.save` a record under a name that it gets when it is whole."""
    import torch

    temporary = path.with_name(f".{path.name}.part")
    try:
        torch.save(dict(record), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
