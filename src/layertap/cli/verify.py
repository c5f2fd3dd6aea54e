"""`layertap verify`: checksums, and a sample of rows computed again by plain transformers."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layertap.cli.options import AsJson, TrustRemoteCode
from layertap.cli.reporting import (
    PARTLY,
    bytes_text,
    errors_explained,
    parse_percent,
    plural,
    quiet_libraries,
    say_error,
)

if TYPE_CHECKING:
    from layertap.datasets.inspection import SampleView
    from layertap.datasets.verify import PartReport

_DEFAULT_SAMPLES = 4


@dataclass(slots=True)
class _Report:
    """What was checked. Printed as it comes, or as JSON at the end."""

    as_json: bool
    facts: dict[str, Any] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    recomputed: list[dict[str, Any]] = field(default_factory=list)
    quarantined: list[Path] = field(default_factory=list)
    checked: os.stat_result | None = None
    wrong_parts: "list[tuple[Path, PartReport]]" = field(default_factory=list)
    """With the data set that each is of."""
    wrong_samples: dict[int | None, str] = field(default_factory=dict)
    """By the place in the input; None: the file."""

    def say(self, text: str) -> None:
        """A line for a person."""
        if not self.as_json:
            typer.echo(text)

    def note_damage(self, reason: str) -> None:
        """A part, or a file, that must not be used."""
        self.damaged.append(reason)
        if not self.as_json:
            say_error(reason)

    @property
    def good(self) -> bool:
        """Nothing is damaged, nothing differs."""
        return not self.damaged and all(entry["good"] for entry in self.recomputed)

    def print(self, path: Path) -> None:
        """For machines."""
        found: dict[str, Any] = {"path": str(path), "verdict": "good" if self.good else "bad", **self.facts}
        found |= {"damaged": self.damaged, "recomputed": self.recomputed}
        if self.quarantined:
            found["quarantined"] = [str(aside) for aside in self.quarantined]
        typer.echo(json.dumps(found, indent=2))


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
        typer.Option(
            min=0, help="How many samples to compute again (4 with --model; none without).", show_default=False
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="The same as a share: 0.1% or 5%; at least one sample.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = 0,
    device: Annotated[str, typer.Option(help="Where plain transformers runs.")] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move what is wrong aside, where no reader finds it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every byte against its checksum; with --model, --sample or --recompute, also compute rows again.

    Rows are computed by plain transformers in float32, one sequence at a time. A row passes with a relative error of at most
    1e-4 where it was computed and saved in float32, 3e-2 otherwise. Exit code 3: something is damaged or differs.
    """
    quiet_libraries()
    report = _Report(as_json)
    with errors_explained():
        if sample is not None and recompute is not None:
            raise typer.BadParameter("--sample and --recompute say the same twice: give one of them")
        share = None if recompute is None else parse_percent(recompute)
        _check(report, path, quarantine)
        if report.good and (model is not None or sample is not None or share is not None):
            count = _DEFAULT_SAMPLES if sample is None else sample
            _recompute(report, _drawn(path, count, share, seed), model, device, trust_remote_code)
        if quarantine and not report.good:
            _set_aside(report, path)
    if as_json:
        report.print(path)
    if not report.good:
        raise typer.Exit(PARTLY)


def _check(report: _Report, path: Path, quarantine: bool) -> None:
    from layertap.errors import CorruptError, HiddenStatesError, MissingError, TornError

    try:
        if path.is_dir():
            _check_dataset(report, path)
        else:
            _check_file(report, path)
    except MissingError:
        raise  # there is nothing to report on
    except HiddenStatesError as exc:
        # what isn't ours, or is still being written, stays
        aside = quarantine and path.is_file() and isinstance(exc, CorruptError | TornError)
        if not (report.as_json or aside):
            raise
        report.note_damage(str(exc))
        if aside:
            report.wrong_samples[None] = str(exc)


def _check_file(report: _Report, path: Path) -> None:
    from layertap.files.read import verify_file

    report.checked = path.stat() if path.exists() else None
    info = verify_file(path, timeout=0)
    size = path.stat().st_size
    report.facts = {"rows": info.num_rows, "layers": list(info.layers), "bytes": size}
    report.say(f"{path}: {info.num_rows:,} rows of {len(info.layers)} layers, {bytes_text(size)}: good")


def _check_dataset(report: _Report, folder: Path) -> None:
    from layertap.datasets.joining import find_shares, joined_lookup, joined_manifest
    from layertap.datasets.lookup import load_lookup
    from layertap.datasets.manifest import read_manifest
    from layertap.datasets.verify import verify_parts

    shares = find_shares(folder)
    if shares:
        joined_manifest(shares)  # they belong together
    samples = tokens = num_bytes = damaged = 0
    for one in shares or [folder]:
        for part in verify_parts(one, read_manifest(one)):
            if part.error is not None:
                damaged += 1
                report.wrong_parts.append((one, part))
                report.note_damage(str(part.error))
                continue
            samples += len(part.done)
            tokens += sum(entry.tokens for entry in part.done)
            num_bytes += part.num_bytes
    report.facts = {"samples": samples, "tokens": tokens, "bytes": num_bytes, "damaged_parts": damaged}
    if not damaged:  # no sample stands in it twice
        joined_lookup(folder, shares) if shares else load_lookup(folder, read_manifest(folder).id)
    state = "good" if not damaged else f"good, {plural(damaged, 'part')} damaged (run extract again to make them anew)"
    report.say(f"{folder}: {plural(samples, 'sample')}, {plural(tokens, 'token')}, {bytes_text(num_bytes)}: {state}")


def _set_aside(report: _Report, path: Path) -> None:
    from layertap.datasets.joining import find_shares
    from layertap.datasets.manifest import read_manifest
    from layertap.datasets.quarantine import set_aside_part, set_aside_samples
    from layertap.datasets.resume import locked_folder
    from layertap.files.publish import set_aside

    if not path.is_dir():
        for reason in report.wrong_samples.values():
            assert report.checked is not None
            report.quarantined.append(set_aside(path, reason, report.checked))
    else:
        wrong = {index: reason for index, reason in report.wrong_samples.items() if index is not None}
        for folder in find_shares(path) or [path]:
            with locked_folder(folder):
                for one, part in report.wrong_parts:
                    if one == folder:
                        report.quarantined.append(set_aside_part(folder, part.path, part.done, str(part.error)))
                report.quarantined += set_aside_samples(folder, read_manifest(folder), wrong)
    for aside in report.quarantined:
        report.say(f"moved aside: {aside}")


def _drawn(path: Path, count: int, share: float | None, seed: int) -> "Iterator[tuple[int | None, SampleView]]":
    from math import ceil
    from random import Random

    from layertap.datasets.inspection import view_file, view_sample
    from layertap.datasets.reader import open_dataset
    from layertap.errors import OptionError

    if not path.is_dir():
        yield None, view_file(path)
        return
    ds = open_dataset(path)
    if ds.manifest.rows.options.get("positions", "all") != "all":
        raise OptionError(
            f"{path}: holds trained positions only; the tokens between aren't in it, so its rows can't be computed again"
        )
    total = len(ds)
    if share is not None:
        count = ceil(share * total)
    for position in sorted(Random(seed).sample(range(total), min(count, total))):
        yield int(ds.indices[position]), view_sample(path, position)


def _recompute(
    report: _Report,
    views: "Iterator[tuple[int | None, SampleView]]",
    model: str | None,
    device: str,
    trust_remote_code: bool,
) -> None:
    from layertap.datasets.recompute import Reference, compare
    from layertap.errors import OptionError

    reference: Reference | None = None
    for index, view in views:
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
        report.recomputed.append(
            {
                "sample": view.title,
                "tokens": len(view.token_ids),
                "worst": float(found.errors[token, slot]),
                "position": token,
                "layer": view.layers[slot],
                "tolerance": found.tolerance,
                "good": found.passed,
            }
        )
        line = (
            f"{view.title}: {plural(len(view.token_ids), 'token')}, largest relative error {found.errors[token, slot]:.2e} "
            f"(position {token}, layer {view.layers[slot]}; tolerance {found.tolerance:g}): "
            f"{'good' if found.passed else 'DIFFERENT'}"
        )
        report.say(line)
        if not found.passed:
            report.wrong_samples[index] = f"computed again with {model or view.model}: {line}"
