"""`layertap verify`: checksums, and a sample of rows computed again by plain transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.cli.reporting import PARTLY, bytes_text, errors_explained, plural, quiet_libraries, say_error

if TYPE_CHECKING:
    from layertap.datasets.inspection import SampleView

_DEFAULT_SAMPLES = 4


def verify(
    path: Annotated[Path, typer.Argument(help="A file of hidden states, or a data set.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            help="Compute rows again with this model; --sample alone takes the one on record.", show_default=False
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="How many samples to compute again (4 with --model; none without).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = 0,
    device: Annotated[str, typer.Option(help="Where plain transformers runs.")] = "cpu",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Code of the checkpoint may run.")
    ] = False,
) -> None:
    """Check every byte against its checksum; with --model or --sample, also compute rows again.

    Rows are computed by plain transformers in float32, one sequence at a time. A row passes with a relative error of at most
    1e-4 where it was computed and saved in float32, 3e-2 otherwise. Exit code 3: something is damaged or differs.
    """
    quiet_libraries()
    with errors_explained():
        good = _check_dataset(path) if path.is_dir() else _check_file(path)
        if good and (model is not None or sample is not None):
            count = _DEFAULT_SAMPLES if sample is None else sample
            views = _drawn(path, count, seed)
            good = _recompute(views, model, device, trust_remote_code)
    if not good:
        raise typer.Exit(PARTLY)


def _check_file(path: Path) -> bool:
    from layertap.files.read import verify_file

    info = verify_file(path, timeout=0)
    size = path.stat().st_size
    typer.echo(f"{path}: {info.num_rows:,} rows of {len(info.layers)} layers, {bytes_text(size)}: good")
    return True


def _check_dataset(folder: Path) -> bool:
    from layertap.datasets.lookup import load_lookup
    from layertap.datasets.manifest import read_manifest
    from layertap.datasets.verify import verify_parts

    manifest = read_manifest(folder)
    samples = tokens = num_bytes = damaged = 0
    for report in verify_parts(folder, manifest):
        if report.error is not None:
            damaged += 1
            say_error(str(report.error))
            continue
        samples += len(report.done)
        tokens += sum(entry.tokens for entry in report.done)
        num_bytes += report.num_bytes
    if not damaged:
        load_lookup(folder, manifest.id)  # no sample stands in it twice
    state = "good" if not damaged else f"good, {plural(damaged, 'part')} damaged (run extract again to make them anew)"
    typer.echo(f"{folder}: {plural(samples, 'sample')}, {plural(tokens, 'token')}, {bytes_text(num_bytes)}: {state}")
    return not damaged


def _drawn(path: Path, count: int, seed: int) -> "Iterator[SampleView]":
    from random import Random

    from layertap.datasets.inspection import view_file, view_sample
    from layertap.datasets.reader import open_dataset
    from layertap.errors import OptionError

    if not path.is_dir():
        yield view_file(path)
        return
    ds = open_dataset(path)
    if ds.manifest.rows.options.get("positions", "all") != "all":
        raise OptionError(
            f"{path}: holds trained positions only; the tokens between aren't in it, so its rows can't be computed again"
        )
    total = len(ds)
    for position in sorted(Random(seed).sample(range(total), min(count, total))):
        yield view_sample(path, position)


def _recompute(views: "Iterator[SampleView]", model: str | None, device: str, trust_remote_code: bool) -> bool:
    from layertap.datasets.recompute import Reference, compare
    from layertap.errors import OptionError

    reference: Reference | None = None
    good = True
    for view in views:
        if view.first_position:
            raise OptionError(
                f"{view.title}: starts at position {view.first_position}, and the tokens before aren't in the file, so its "
                "rows can't be computed again"
            )
        if reference is None:
            reference = Reference(
                model or view.model,
                revision=view.revision if model is None else None,
                trust_remote_code=trust_remote_code,
                device=device,
            )
        found = compare(
            view.rows,
            reference.rows(view.token_ids, view.layers),
            save_dtype=view.save_dtype,
            compute_dtype=view.compute_dtype,
        )
        token, slot = found.worst
        verdict = "good" if found.passed else "DIFFERENT"
        typer.echo(
            f"{view.title}: {plural(len(view.token_ids), 'token')}, largest relative error {found.errors[token, slot]:.2e} "
            f"(position {token}, layer {view.layers[slot]}; tolerance {found.tolerance:g}): {verdict}"
        )
        good = good and found.passed
    return good
