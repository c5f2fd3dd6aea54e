"""`layertap import`: hidden states that others wrote, as a data set."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from layertap.cli.options import Quiet
from layertap.cli.reporting import PARTLY, bytes_text, errors_explained, plural, say, say_error

_MOST_SHOWN = 20


def import_(
    folder: Annotated[Path, typer.Argument(help="The folder that others wrote.", show_default=False)],
    format: Annotated[
        Literal["files", "vllm", "speculators"],
        typer.Option(
            "--from",
            help="files: layertap's own, one a request; vllm: of its ExampleHiddenStatesConnector; speculators: its training data.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The data set; new, or one to continue.", show_default=False)],
    layers: Annotated[
        str | None,
        typer.Option(help="Ids of the layers, in the order of the files; vLLM's don't say them.", show_default=False),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(help="Blocks of the model; with --layers.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name or path of the model, to be put on record.", show_default=False)
    ] = None,
    compress: Annotated[
        bool, typer.Option("--compress", help="Store rows in compressed blocks, lossless; reading costs more.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Make a data set of hidden states that others wrote: checked, with checksums, an index and a manifest.

    Example: layertap import requests --from vllm --layers 2,18,33 --num-layers 36 --model Qwen/Qwen3-8B --out states
    """
    with errors_explained():
        from layertap.datasets.importing import ImportOptions, import_dataset

        options = ImportOptions(format=format, layers=layers, num_layers=num_layers, model=model, compress=compress)
        report = import_dataset(folder, out, options)
    for reason in report.damaged:
        say_error(f"set aside and imported again: {reason}")
    for _, reason in report.failures[:_MOST_SHOWN]:
        say_error(reason)
    if len(report.failures) > _MOST_SHOWN:
        say_error(f"{len(report.failures) - _MOST_SHOWN} more failed; all are on record in the data set")
    if not quiet:
        skipped = f", {report.num_skipped:,} done before" if report.num_skipped else ""
        say(
            f"{plural(report.num_samples, 'sample')}, {plural(report.num_tokens, 'token')}, {bytes_text(report.num_bytes)} "
            f"in {out}{skipped}; {len(report.failures):,} failed"
        )
        if report.strangers:
            say(f"left alone: {plural(len(report.strangers), 'file')} of no sample, such as {report.strangers[0]!r}")
    if report.failures or report.damaged:
        raise typer.Exit(PARTLY)
