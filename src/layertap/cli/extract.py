"""`layertap extract`: an input file through a model into a data set."""

import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from layertap.cli.options import (
    INPUT,
    MODEL,
    ROWS,
    ChatTemplateKwargs,
    Device,
    Dtype,
    EngineName,
    Field,
    InputFormat,
    Layers,
    Limit,
    MaxModelLen,
    MaxNumBatchedTokens,
    Model,
    Positions,
    Quiet,
    Revision,
    SaveDtype,
    Tokenizer,
    TrustRemoteCode,
)
from layertap.cli.reporting import (
    PARTLY,
    STOPPED,
    errors_explained,
    parse_bytes,
    parse_json,
    parse_shard,
    plural,
    quiet_libraries,
    say,
    say_error,
)
from layertap.cli.stopping import GracefulStop

if TYPE_CHECKING:
    from layertap.cli.progress import RunProgress
    from layertap.datasets.extraction import RunOptions, RunReport
    from layertap.datasets.inputs import InputFile
    from layertap.datasets.ray_run import RayOptions
    from layertap.datasets.regenerating import RegenerateOptions

Report = TypeVar("Report")

_SHOWN_FAILURES = 10
_ANSWERS, _CLUSTER = "Answers of the model", "Cluster"


def extract(
    model: Model,
    input: Annotated[
        Path,
        typer.Argument(help="JSONL, JSON array, Parquet or text: one prompt or chat a record.", show_default=False),
    ],
    layers: Layers,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the data set. Run the same command again to continue.",
            rich_help_panel=ROWS,
            show_default=False,
        ),
    ],
    layout: Annotated[
        Literal["shards", "files"], typer.Option(help="Many samples a file, or one.", rich_help_panel=ROWS)
    ] = "shards",
    save_dtype: SaveDtype = None,
    positions: Positions = "all",
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="What samples near one another have in common at their beginning is computed and stored once.",
            rich_help_panel=ROWS,
        ),
    ] = False,
    compress: Annotated[
        bool,
        typer.Option(
            "--compress",
            help="Store rows in compressed blocks (zstd), lossless; reading costs more.",
            rich_help_panel=ROWS,
        ),
    ] = False,
    shard_size: Annotated[str, typer.Option(help="A shard is closed at this size.", rich_help_panel=ROWS)] = "2GiB",
    shard_seconds: Annotated[
        float, typer.Option(help="A shard is closed after this time; the most that a kill costs.", rich_help_panel=ROWS)
    ] = 30.0,
    fsync: Annotated[
        bool, typer.Option(help="Sync each shard to the disk before it gets its name.", rich_help_panel=ROWS)
    ] = True,
    resume_check: Annotated[
        Literal["rows", "headers"],
        typer.Option(help="How much of what is done already is checked by checksum.", rich_help_panel=ROWS),
    ] = "rows",
    shard: Annotated[
        str | None,
        typer.Option(
            help="i/n, i from 0: only every n-th record, into OUT/shard-i-of-n; for several machines.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    limit: Limit = None,
    input_format: InputFormat = None,
    field: Field = None,
    text_unit: Annotated[
        Literal["line", "paragraph", "file"],
        typer.Option(help="What one prompt of a text file is.", rich_help_panel=INPUT),
    ] = "line",
    add_generation_prompt: Annotated[
        bool,
        typer.Option(
            "--add-generation-prompt",
            help="End each chat with the header of the assistant's next turn.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    loss_mask: Annotated[
        bool,
        typer.Option(help="Find the tokens of chats that the model would have generated.", rich_help_panel=INPUT),
    ] = True,
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate",
            help="The model answers every turn anew; the states are of what it said.",
            rich_help_panel=_ANSWERS,
        ),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default the model's own.", rich_help_panel=_ANSWERS)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Default the model's own.", rich_help_panel=_ANSWERS)] = None,
    top_k: Annotated[int | None, typer.Option(help="Default the model's own.", rich_help_panel=_ANSWERS)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of an answer; default 2048.", rich_help_panel=_ANSWERS)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all answers; default 0.", rich_help_panel=_ANSWERS)] = None,
    template_date: Annotated[
        datetime | None,
        typer.Option(
            help="For chat templates that print today's date; default the day of the set's first run.",
            formats=["%Y-%m-%d"],
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    engine: EngineName = "transformers",
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: TrustRemoteCode = False,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Of the GPU, such as 24GiB; blocks that don't fit in it are streamed. Default what is free.",
            rich_help_panel=MODEL,
            show_default=False,
        ),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Run on a Ray cluster (RAY_ADDRESS, or one on this machine).", rich_help_panel=_CLUSTER
        ),
    ] = False,
    ray_actors: Annotated[
        int | None,
        typer.Option(help="Default: one for each GPU of the cluster.", rich_help_panel=_CLUSTER, show_default=False),
    ] = None,
    ray_cpus: Annotated[float, typer.Option(help="CPUs that each actor asks for.", rich_help_panel=_CLUSTER)] = 1.0,
    quiet: Quiet = False,
) -> None:
    """Extract hidden states of a file of prompts into a data set.

    Prefill only (but for --regenerate), no block past the deepest layer is loaded. Prompts that fail are listed at the end
    (exit code 3); the others are written. Stopped or killed at any moment, the same command goes on.

    Example: layertap extract Qwen/Qwen3-8B chats.jsonl --layers eagle3 --out states
    """
    quiet_libraries()
    if max_memory is not None and engine == "vllm":
        raise typer.BadParameter(
            "the embedded engine's; vLLM streams weights with its own options", param_hint="--max-memory"
        )
    given = {
        "dtype": dtype,
        "device": device,
        "revision": revision,
        "tokenizer": tokenizer,
        "trust_remote_code": trust_remote_code or None,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_memory": max_memory,
    }
    with errors_explained():
        from layertap.datasets.extraction import RunOptions
        from layertap.datasets.inputs import open_input
        from layertap.datasets.joining import refuse_share_beside_set, shard_folder
        from layertap.datasets.writer import ShardOptions
        from layertap.errors import PromptError

        share = (0, 1) if shard is None else parse_shard(shard)
        source = open_input(input, format=input_format, field=field, text_unit=text_unit, limit=limit, share=share)
        if shard is not None:
            refuse_share_beside_set(out)
            out = out / shard_folder(*share)
        elif next(iter(source), None) is None:
            raise PromptError(f"{input}: holds no prompts")
        options = RunOptions(
            layers=layers,
            layout=layout,
            save_dtype=save_dtype,
            add_generation_prompt=add_generation_prompt,
            loss_mask=loss_mask,
            positions=positions,
            regenerate=_answers(regenerate, temperature, top_p, top_k, max_tokens, seed),
            template_date=None if template_date is None else template_date.date(),
            chat_template_kwargs=parse_json("--chat-template-kwargs", chat_template_kwargs),
            share_prefixes=share_prefixes,
            compress=compress,
            check_rows=resume_check == "rows",
            shards=ShardOptions(
                shard_bytes=parse_bytes(shard_size, "--shard-size"), shard_seconds=shard_seconds, fsync=fsync
            ),
        )
        engine_options = {name: value for name, value in given.items() if value is not None}
        if ray:
            from layertap.datasets.ray_run import RayOptions

            on_cluster = RayOptions(actors=ray_actors, cpus=ray_cpus)
            _run_on_cluster(model, on_cluster, {"engine": engine, **engine_options}, source, out, options, quiet)
            return
        if ray_actors is not None:
            raise typer.BadParameter("only with --ray", param_hint="--ray-actors")
        _run(model, engine, engine_options, source, out, options, quiet)


def _answers(regenerate: bool, *given: float | None) -> "RegenerateOptions | None":
    from layertap.datasets.regenerating import RegenerateOptions
    from layertap.errors import OptionError

    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    options: dict[str, Any] = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    if not regenerate and options:
        raise OptionError(
            f"--{next(iter(options)).replace('_', '-')} is for answers of the model; give --regenerate, too"
        )
    return RegenerateOptions(**options) if regenerate else None


def _run(
    model: str,
    engine: str,
    engine_options: dict[str, Any],
    source: "InputFile",
    out: Path,
    options: "RunOptions",
    quiet: bool,
) -> None:
    from layertap.cli.progress import RunProgress, summary
    from layertap.datasets.counting import estimate_records
    from layertap.datasets.extraction import extract_dataset
    from layertap.llm import LLM

    if not quiet:
        say(f"loading {model}")
    progress = RunProgress(estimate_records(source), quiet=quiet)
    with LLM(model, engine=engine, layers=options.layers, **engine_options) as llm, GracefulStop(progress.note) as stop:
        if not quiet:
            info = llm.info
            say(
                f"{info.num_layers} blocks of {info.hidden_size}, {info.dtype} on {info.device}; "
                f"{info.engine} {info.engine_version}"
            )

        report = _watched(progress, stop, out, partial(extract_dataset, llm, source, out, options))
        if not quiet:
            say(summary(report))
    _end(report, out)


def _watched(progress: "RunProgress", stop: GracefulStop, out: Path, work: Callable[..., Report]) -> Report:
    """Run a job behind its progress bar, until it is done or asked to stop."""

    def should_stop() -> bool:
        progress.tick()
        return stop.requested

    try:
        with progress:
            return work(on_start=progress.begin, should_stop=should_stop)
    except KeyboardInterrupt:
        _say_how_to_continue(out)
        raise typer.Exit(STOPPED) from None


def _run_on_cluster(
    model: str,
    on_cluster: "RayOptions",
    engine_options: dict[str, Any],
    source: "InputFile",
    out: Path,
    options: "RunOptions",
    quiet: bool,
) -> None:
    from layertap.cli.progress import RunProgress, summary
    from layertap.datasets.counting import estimate_records
    from layertap.datasets.ray_run import extract_with_ray

    if not quiet:
        say(f"starting actors that load {model}")
    progress = RunProgress(estimate_records(source), quiet=quiet)
    with GracefulStop(progress.note) as stop:
        work = partial(extract_with_ray, model, source, out, options, ray_options=on_cluster, **engine_options)
        report = _watched(progress, stop, out, work)
        if not quiet:
            for actor in report.actors:
                say(f"  {actor.name}: {plural(actor.num_samples, 'sample')}{', died' * actor.died} ({actor.where})")
            say(summary(report))
    _end(report, out)


def _end(report: "RunReport", out: Path) -> None:
    if report.num_unshown:
        say(
            f"{plural(report.num_unshown, 'earlier answer')} not trained: the chat template shows them with other tokens "
            "than were generated"
        )
    if report.failures:
        say_error(f"{plural(report.num_failed, 'prompt')} failed; all others were delivered:")
        for _, reason in report.failures[:_SHOWN_FAILURES]:
            say(f"  {reason}")
        if report.num_failed > _SHOWN_FAILURES:
            say(f"  and {report.num_failed - _SHOWN_FAILURES:,} more: layertap.open_dataset({str(out)!r}).failures")
    if report.stopped:
        _say_how_to_continue(out)
        raise typer.Exit(STOPPED)
    if report.num_failed:
        raise typer.Exit(PARTLY)


def _say_how_to_continue(out: Path) -> None:
    say(f"stopped: what is in {out} is complete. To continue, run the same command again:")
    say(f"  {shlex.join(['layertap', *sys.argv[1:]])}")
