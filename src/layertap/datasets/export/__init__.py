"""Data sets for other trainers, one module a format."""

from pathlib import Path

from layertap.datasets.reader import Dataset
from layertap.errors import OptionError


def new_folder(out: Path) -> None:
    """Make the folder of an export.

    Raises:
        OptionError: it holds something already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise OptionError(f"{out}: the folder isn't empty; an export needs a new or empty one")


def refuse_gaps(dataset: Dataset) -> None:
    """Refuse a set that holds rows of some positions only, for formats that have no place for positions.

    Raises:
        OptionError: it does.
    """
    if dataset.manifest.rows.options.get("positions", "all") != "all":
        raise OptionError(
            f"{dataset.folder}: holds trained positions only, and this format needs the rows of all; extract with "
            "positions 'all'"
        )
