"""Folders of hidden states that others wrote, into a data set: what `layertap import` runs.

    report = import_dataset("requests", "states", ImportOptions(format="vllm", layers=[2, 18, 33], num_layers=36))

Every file becomes a sample, or a failure with its reason. The first file that can be read says what the set's rows are; those that
differ fail. What a file doesn't say, and nobody else did, is on record as unknown.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from layertap import __version__
from layertap.capture.layers import LayersLike, resolve_layers
from layertap.capture.request import slot_bytes
from layertap.datasets.importing_files import UNKNOWN, Imported
from layertap.datasets.importing_sources import Source, SourceFile, SourceFormat, open_source
from layertap.datasets.lookup import write_cache
from layertap.datasets.manifest import Manifest, RowIdentity
from layertap.datasets.resume import Prepared, locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, Sample, ShardOptions
from layertap.errors import ForeignError, HiddenStatesError, OptionError
from layertap.files.format import COMPRESSION
from layertap.files.paths import whole_path

ENGINE = "imported"
_FACTS = ("engine", "engine_version", "weights_version", "lora")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What is known of the files."""

    format: SourceFormat
    layers: LayersLike | None = None
    """The ids of the rows' layers, in the order of the files; None: the files say it."""
    num_layers: int | None = None
    """Blocks of the model; None: the files say it."""
    model: str | None = None
    """Name or path of the model; None: the files say it, or it is unknown."""
    compress: bool = False
    """Store rows in compressed blocks, lossless."""
    shards: ShardOptions = field(default_factory=ShardOptions)

    def __post_init__(self) -> None:
        if (self.layers is None) != (self.num_layers is None):
            raise OptionError("layers and num_layers: give both or neither; ids have a meaning only with the depth")
        if self.num_layers is not None and self.num_layers < 1:
            raise OptionError(f"num_layers: expected at least 1, got {self.num_layers}")
        if self.format == "vllm" and self.layers is None:
            raise OptionError("layers and num_layers: vLLM's files don't say which layers they hold; give both")


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What an import did."""

    folder: Path
    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    """Of rows."""
    num_skipped: int = 0
    """Samples that were done already."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(file, reason) of every file that is no sample."""
    damaged: list[str] = field(default_factory=list)
    """What an earlier import left damaged; it was set aside and imported again."""
    strangers: list[str] = field(default_factory=list)
    """Files of the folder that are of no sample of the format."""


def import_dataset(
    folder: str | Path,
    out: str | Path,
    options: ImportOptions,
    on_file: Callable[[int, int], None] = lambda _done, _all: None,
) -> ImportReport:
    """Import a folder; continue an import that was stopped.

    Args:
        folder: what others wrote; nothing in it is changed.
        out: the data set.
        options: what the files are.
        on_file: called with the number of files that are through, and of all.

    Returns:
        The report. Files that failed are listed in it and on record in the set, and are tried again by the next import.

    Raises:
        OptionError: an option is missing or can't be honoured, no file can be read, or the set was made from something else.
        TargetExistsError: another job writes to the set.
        StoreFullError: the disk is full; finished samples are kept.
    """
    folder, out = whole_path(folder), whole_path(out)
    if out.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(out.resolve()):
        raise OptionError(f"{out}: the data set can't lie in the folder that is imported, nor the other way round")
    source = open_source(folder, options.format)
    manifest = _manifest(folder, source, options)
    report = ImportReport(folder=out, strangers=[_text(name) for name in source.strangers])
    with locked_folder(out):
        prepared = prepare_folder(out, manifest)
        report.damaged = prepared.damaged
        hashes = [_source_hash(file) for file in source.files]
        _refuse_changed(folder, source, hashes, prepared)
        with DatasetWriter(out, prepared.manifest, options.shards) as writer:
            for index, file in enumerate(source.files):
                if prepared.done.get(index) is None:
                    _import_file(writer, prepared.manifest, index, file, hashes[index], report)
                else:
                    report.num_skipped += 1
                on_file(index + 1, len(source.files))
        with contextlib.suppress(OSError, HiddenStatesError):  # opening is slower without it, nothing else
            write_cache(out, prepared.manifest.id)
    return report


def _import_file(
    writer: DatasetWriter, manifest: Manifest, index: int, file: SourceFile, source_hash: str, report: ImportReport
) -> None:
    try:
        found = file.read()
        _refuse_other(manifest.rows, found, file.path)
    except (HiddenStatesError, OSError) as exc:
        name, reason = _text(file.name), _text(str(exc))
        report.failures.append((name, reason))
        writer.add_failure(index=index, source_hash=source_hash, sample_id=name, reason=reason)
        return
    tokens = len(found.token_ids)
    whole = manifest.rows.options["positions"] == "all"
    writer.add(
        Sample(
            index=index,
            source_hash=source_hash,
            sample_id=_text(file.name),
            rows=found.rows,
            token_ids=found.token_ids,
            prompt_tokens=found.prompt_tokens,
            finish_reason=found.facts.get("finish_reason", UNKNOWN),
            loss_mask=found.loss_mask,
            positions=None if whole else ((found.first_position, found.first_position + tokens),),
        )
    )
    report.num_samples += 1
    report.num_tokens += tokens
    report.num_bytes += found.rows.nbytes


def _manifest(folder: Path, source: Source, options: ImportOptions) -> Manifest:
    """Say what the rows are, by the first file that can be read.

    Raises:
        OptionError: there is none, or it doesn't say enough.
    """
    reasons = []
    for file in source.files:
        try:
            found = file.read()
        except (HiddenStatesError, OSError) as exc:
            reasons.append(str(exc))
            continue
        made_by = {"layertap_version": __version__, "created": datetime.now(UTC).isoformat(timespec="seconds")}
        rows = _identity(found, options, file.path)
        return Manifest(rows=rows, layout="shards", input_name=folder.name, made_by=made_by)
    raise OptionError(f"{folder}: none of {len(reasons)} files can be read; the first: {reasons[0]}")


def _identity(found: Imported, options: ImportOptions, path: Path) -> RowIdentity:
    info = found.info
    if options.num_layers is not None and options.layers is not None:
        num_layers, layers = options.num_layers, resolve_layers(options.layers, options.num_layers)
    elif info is not None:
        num_layers, layers = info.num_layers, info.layers
    else:
        raise OptionError(f"{path}: doesn't say which layers it holds, nor of how many; give layers and num_layers")
    if len(layers) != found.num_slots:
        raise OptionError(
            f"layers: {list(layers)} are {len(layers)}, but {path} holds the rows of {found.num_slots} layers"
        )
    slot_bytes(found.dtype, found.hidden_size)
    identity = RowIdentity(
        model=options.model or (UNKNOWN if info is None else info.model),
        revision=found.facts.get("revision") or None,
        model_fingerprint=None,
        tokenizer_hash=None,
        chat_template_hash=None,
        layers=layers,
        num_layers=num_layers,
        hidden_size=found.hidden_size,
        save_dtype=found.dtype,
        compute_dtype=found.facts.get("compute_dtype") or UNKNOWN,
        quantization=found.facts.get("quantization") or None,
        residual=found.facts.get("residual") or UNKNOWN,
        engine=ENGINE,
        engine_version=UNKNOWN,
        options={
            "imported_from": options.format,
            "compress": COMPRESSION if options.compress else None,
            "positions": "all" if found.first_position == 0 else "window",
            **{f"written_by.{name}": found.facts.get(name) for name in _FACTS},
        },
    )
    try:
        _refuse_other(identity, found, path)
    except ForeignError as exc:
        raise OptionError(f"the file says something else than the options: {exc}") from exc
    return identity


def _refuse_other(rows: RowIdentity, found: Imported, path: Path) -> None:
    """Refuse a file whose rows aren't like those of the set.

    Raises:
        ForeignError: says in what they differ.
    """
    here: dict[str, Any] = {"dtype": rows.save_dtype, "layers": len(rows.layers), "hidden size": rows.hidden_size}
    there: dict[str, Any] = {"dtype": found.dtype, "layers": found.num_slots, "hidden size": found.hidden_size}
    if rows.options["positions"] == "all":
        here["first position"], there["first position"] = 0, found.first_position
    if found.info is not None:
        here |= {"layers": list(rows.layers), "blocks": rows.num_layers, "model": rows.model}
        there |= {"layers": list(found.info.layers), "blocks": found.info.num_layers, "model": found.info.model}
    here |= {name: rows.options[f"written_by.{name}"] for name in _FACTS}
    there |= {name: found.facts.get(name) for name in _FACTS}
    for name, unknown in (
        ("revision", None),
        ("quantization", None),
        ("compute_dtype", UNKNOWN),
        ("residual", UNKNOWN),
    ):
        here[name], there[name] = getattr(rows, name), found.facts.get(name) or unknown
    differing = [f"{name}: {there[name]!r}, the set has {here[name]!r}" for name in here if here[name] != there[name]]
    if differing:
        raise ForeignError(f"{path}: not of the same rows as the set: {'; '.join(differing)}")


def _source_hash(file: SourceFile) -> str:
    """By name and size: what a file held was checked when it was imported."""
    size = file.path.stat().st_size if file.path.exists() else -1
    return str(xxhash.xxh3_128_hexdigest(f"{file.name}\0{size}".encode(errors="surrogateescape")))


def _text(name: str) -> str:
    """A name that can be written down: file names may hold any bytes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _refuse_changed(folder: Path, source: Source, hashes: list[str], prepared: Prepared) -> None:
    for index in prepared.done.index.tolist():
        if index >= len(hashes) or prepared.done.get(index) != hashes[index]:
            now = f"{source.files[index].name} is there now" if index < len(hashes) else "there are fewer files now"
            raise OptionError(
                f"{folder}: sample {index} of the data set was made from another file ({now}); files were removed, changed, "
                "or added before it. Import into another folder"
            )
