"""`layertap export`: a data set in another trainer's format."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from layertap.cli.reporting import errors_explained, plural, say


def export(
    folder: Annotated[Path, typer.Argument(help="A data set.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    format: Annotated[Literal["speculators", "numpy"], typer.Option(help="What is written.", show_default=False)],
    verify: Annotated[bool, typer.Option(help="Compare each sample with its checksum.")] = True,
) -> None:
    """Write a data set in the format of another trainer.

    Example: layertap export states for-speculators --format speculators
    """
    with errors_explained():
        from layertap.datasets.export.arrays import export_numpy
        from layertap.datasets.export.speculators import export_speculators
        from layertap.datasets.reader import open_dataset

        write = {"speculators": export_speculators, "numpy": export_numpy}[format]
        count = write(open_dataset(folder, verify=verify), out)
    say(f"{plural(count, 'sample')} in {out}")
