"""`layertap doctor`: does it work here, with this model?"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.cli.options import AsJson, Device, EngineName, Model, Revision, TrustRemoteCode
from layertap.cli.reporting import PARTLY, errors_explained, quiet_libraries
from layertap.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from layertap.trust.findings import LayerError, Report

_MARKS = {"good": "[green]good[/]", "note": "[yellow]note[/]", "bad": "[bold red]BAD[/]"}
_BAR_COLUMNS = 24
_DECADES = 8


def doctor(
    model: Model,
    storage: Annotated[Path, typer.Option(help="The folder that files would go to; it is examined too.")] = Path(
        "/tmp"
    ),
    engine: EngineName = "transformers",
    dtype: Annotated[str, typer.Option(help="Compute dtype: auto, float32, bfloat16, float16.")] = "auto",
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the errors by layer into this file (.png, .svg, .pdf).", show_default=False),
    ] = None,
) -> None:
    """Examine a model and a folder on this machine before you rely on them; takes a minute or two.

    Rows are compared with plain transformers in float32, layer by layer; prompts that share a forward with prompts alone; rows of
    generated tokens with prefilled ones; the last layer goes through the model's own norm and head. The folder is tried for atomic
    renames, locks, sync, room and speed. Exit code 3: something must not be used.

    With --engine vllm the rows are those that vLLM saves: short prompts, one that goes in chunks, one that begins like another, and
    generated tokens, whose logprobs are compared, too.
    """
    quiet_libraries()
    with errors_explained():
        from layertap.trust.examination import examine

        if engine == "vllm":  # read when it is imported; what it logs must not stand between the lines of a JSON report
            os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if picture is not None and not picture.absolute().parent.is_dir():
            raise OptionError(f"picture: {picture}: there is no folder {picture.absolute().parent}")
        report = examine(
            model,
            storage=storage,
            engine=engine,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        from rich.console import Console

        _show(Console(soft_wrap=False), report)
    if picture is not None:
        with errors_explained():
            from layertap.trust.picture import draw_errors

            draw_errors(report, picture)
    if report.bad:
        raise typer.Exit(PARTLY)


def _show(console: "Console", report: "Report") -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(f"[bold]{escape(report.model)}[/] on the {report.engine} engine", highlight=False)
    console.print(
        "  ".join(f"{name} {version}" for name, version in report.versions.items()), style="dim", highlight=False
    )
    for section in dict.fromkeys(finding.section for finding in report.findings):
        table = Table(
            show_header=False, box=None, padding=(0, 1), title=section, title_justify="left", title_style="bold"
        )
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in report.findings:
            if finding.section == section:
                table.add_row(_MARKS[finding.state], finding.name, escape(finding.text))
        console.print(table)
    if report.layers:
        _show_layers(console, report.layers)
    if report.bad:
        names = ", ".join(finding.name for finding in report.bad)
        console.print(f"[bold red]Don't rely on this:[/] {escape(names)}")
    else:
        console.print("[bold green]All good:[/] rows of this model and files in this folder can be relied on.")


def _show_layers(console: "Console", layers: "list[LayerError]") -> None:
    """The errors by layer as bars over decades, on one screen."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=None, padding=(0, 1), title="errors by layer, against float32", title_justify="left", title_style="bold"
    )
    table.add_column("layer", justify="right")
    table.add_column("median", justify="right")
    table.add_column("worst", justify="right")
    table.add_column("at", overflow="ellipsis", no_wrap=True)
    table.add_column(f"median, 1e-{_DECADES} to 1", no_wrap=True)
    step = -(-len(layers) // 16)
    shown = [entry for entry in layers if entry.layer % step == 0 or entry is layers[-1]]
    for entry in shown:
        style = "red" if entry.median > entry.tolerance else "green"
        bar = f"[{style}]{_bar(entry.median)}[/]"
        where = f"{entry.position} {entry.token}"
        table.add_row(str(entry.layer), f"{entry.median:.1e}", f"{entry.worst:.1e}", escape(where), bar)
    console.print(table)


def _bar(error: float) -> str:
    import math

    decades = _DECADES + (math.log10(error) if error > 0 else -_DECADES)
    return "\u2588" * max(0, min(_BAR_COLUMNS, round(decades / _DECADES * _BAR_COLUMNS)))
