"""`layertap export`: a data set in another trainer's format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layertap.cli.reporting import errors_explained, plural, say
from layertap.errors import OptionError

if TYPE_CHECKING:
    from layertap.datasets.reader import Dataset

_NORMED = ("specforge", "modelopt")


def export(
    folder: Annotated[Path, typer.Argument(help="A data set.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    format: Annotated[
        Literal["speculators", "specforge", "modelopt", "datasets", "saelens", "numpy"],
        typer.Option(help="What is written.", show_default=False),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="specforge, modelopt: the model of the rows; its final norm is applied to the last layer.",
            show_default=False,
        ),
    ] = None,
    context_size: Annotated[
        int | None, typer.Option(min=1, help="saelens: tokens a row; default 128.", show_default=False)
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare each sample with its checksum.")] = True,
) -> None:
    """Write a data set in the format of another trainer.

    Example: layertap export states for-speculators --format speculators
    """
    with errors_explained():
        from layertap.datasets.reader import open_dataset

        if model is not None and format not in _NORMED:
            raise OptionError(f"--model is for the formats {', '.join(_NORMED)}; {format} takes rows as they are")
        if context_size is not None and format != "saelens":
            raise OptionError(f"--context-size is for the format saelens, not {format}")
        written = _write(format, open_dataset(folder, verify=verify), out, model, context_size or 128)
    say(f"{written} in {out}")


def _write(format: str, dataset: "Dataset", out: Path, model: str | None, context_size: int) -> str:
    from layertap.datasets.export.arrays import export_numpy
    from layertap.datasets.export.huggingface import export_datasets
    from layertap.datasets.export.modelopt import export_modelopt
    from layertap.datasets.export.saelens import export_saelens
    from layertap.datasets.export.specforge import export_specforge
    from layertap.datasets.export.speculators import export_speculators

    if format == "specforge":
        return plural(export_specforge(dataset, out, model), "sample")
    if format == "modelopt":
        return plural(export_modelopt(dataset, out, model), "sample")
    if format == "saelens":
        cached = export_saelens(dataset, out, context_size)
        hooks = ", ".join(cached.hook_names)
        left = plural(cached.num_left_out, "token") + " left out at the end"
        return f"{plural(cached.num_rows, 'row')} of {cached.context_size} tokens, hooks {hooks} ({left})"
    write = {"speculators": export_speculators, "numpy": export_numpy, "datasets": export_datasets}[format]
    return plural(write(dataset, out), "sample")
