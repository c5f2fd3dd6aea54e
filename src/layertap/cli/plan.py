"""`layertap plan`: what an extraction would take."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.cli.options import (
    ChatTemplateKwargs,
    Device,
    Dtype,
    Field,
    InputFormat,
    Layers,
    Limit,
    MaxModelLen,
    Model,
    Positions,
    Revision,
    SaveDtype,
    Tokenizer,
    TrustRemoteCode,
)
from layertap.cli.reporting import (
    bytes_text,
    errors_explained,
    fitted,
    parse_json,
    plural,
    quiet_libraries,
    runs_text,
    seconds_text,
)

if TYPE_CHECKING:
    from layertap.datasets.plan import Plan


def plan(
    model: Model,
    input: Annotated[Path, typer.Argument(help="As for extract.", show_default=False)],
    layers: Layers,
    out: Annotated[Path, typer.Option(help="Where the data set would go; for the free space.")] = Path(),
    save_dtype: SaveDtype = None,
    positions: Positions = "all",
    sample: Annotated[int, typer.Option(min=1, help="How many records are tokenized.")] = 1000,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model and run the sample for a while, to know the time.")
    ] = False,
    measure_seconds: Annotated[float, typer.Option(help="How long.")] = 15.0,
    limit: Limit = None,
    input_format: InputFormat = None,
    field: Field = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: TrustRemoteCode = False,
    max_model_len: MaxModelLen = None,
) -> None:
    """Say what an extraction would take: tokens, disk, memory, time, and what options would save.

    Reads the model's configuration and a sample of the input. Nothing is written.

    Example: layertap plan Qwen/Qwen3-8B chats.jsonl --layers eagle3 --measure
    """
    quiet_libraries()
    given = {
        "dtype": dtype,
        "device": device,
        "revision": revision,
        "tokenizer": tokenizer,
        "trust_remote_code": trust_remote_code or None,
        "max_model_len": max_model_len,
    }
    with errors_explained():
        from layertap.datasets.extraction import RunOptions
        from layertap.datasets.inputs import open_input
        from layertap.datasets.plan import make_plan

        made = make_plan(
            model,
            open_input(input, format=input_format, field=field, limit=limit),
            RunOptions(
                layers=layers,
                save_dtype=save_dtype,
                positions=positions,
                chat_template_kwargs=parse_json("--chat-template-kwargs", chat_template_kwargs),
            ),
            out,
            sample=sample,
            measure_seconds=measure_seconds if measure else None,
            **{name: value for name, value in given.items() if value is not None},
        )
    for line in lines_of(made):
        typer.echo(fitted(line, 9))


def lines_of(plan: "Plan") -> list[str]:
    """A plan in words."""
    found, info = plan.input, plan.info
    about = "" if found.is_exact else "about "
    error = "" if found.is_exact else f" (+- {found.tokens_error:,}, from a sample of {found.num_sampled:,})"
    lines = [
        f"model    {info.model}: {info.num_layers} blocks of {info.hidden_size}, {info.dtype} on {info.device}",
        f"layers   {runs_text(plan.layers)}: {plan.num_blocks} of {info.num_layers} blocks are run",
        f"input    {plural(found.num_records, 'record')}, {about}{plural(found.tokens, 'token')}{error}; "
        f"mean {found.mean_tokens:,.0f}, longest {found.longest:,}",
    ]
    if found.failures:
        lines.append(f"         {found.share_failing:.1%} of the records would fail:")
        lines += [f"           {count:,} x {reason}" for reason, count in found.failures.items()]
    room = "" if plan.disk_bytes < plan.disk_free else "  NOT ENOUGH"
    lines += [
        f"disk     {about}{bytes_text(plan.disk_bytes)} of rows in {plan.save_dtype}; {bytes_text(plan.disk_free)} are free{room}",
        f"memory   {bytes_text(plan.weights_bytes)} of weights (all of the model: {bytes_text(plan.all_weights_bytes)}) "
        f"and activations on {info.device}; at most {bytes_text(plan.rows_budget)} of rows on the host",
    ]
    if plan.seconds is None:
        lines.append("time     not known without running it: --measure")
    else:
        lines.append(
            f"time     {about}{seconds_text(plan.seconds)} at {plan.tokens_per_second:,.0f} tokens/s, measured here"
        )
    made = plan.compression
    if made is None:
        lines.append("compress not known without running it: --measure")
    else:
        ratio, speed = made.row_bytes / made.stored_bytes, bytes_text(made.row_bytes / made.seconds)
        lines.append(f"compress {ratio:.2f} times smaller, at {speed}/s a core, measured on rows of the sample")
    lines += [
        f"{'' if number else 'rounding':8} layer {one.layer}: rows in {plan.save_dtype} are off by {one.mean:.1%} on average, "
        f"{one.worst:.1%} at worst"
        for number, one in enumerate(plan.rounding)
    ]
    lines += [
        f"{'or' if number else 'instead':8} {option}: {bytes_text(size)} on disk"
        for number, (option, size) in enumerate(plan.savings)
    ]
    return lines
