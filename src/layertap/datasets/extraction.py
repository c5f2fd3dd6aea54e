"""From an input file through a model into a data set: what `layertap extract` runs.

    llm = layertap.LLM("Qwen/Qwen3-8B")
    report = extract_dataset(llm, open_input("chats.jsonl"), "states", layers="eagle3")

Running it again continues: finished samples are verified by their checksums and skipped, failed ones are tried again.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from layertap import __version__
from layertap.capture.layers import LayersLike, resolve_layers
from layertap.capture.request import SAVE_DTYPES, slot_bytes
from layertap.chat_templates import trouble_with
from layertap.datasets.fingerprint import model_fingerprint, template_hash, tokenizer_hash
from layertap.datasets.inputs import InputFile, Record
from layertap.datasets.lookup import write_cache
from layertap.datasets.manifest import LAYOUTS, Layout, Manifest, RowIdentity, read_manifest
from layertap.datasets.regenerating import RegenerateOptions
from layertap.datasets.resume import (
    Done,
    Prepared,
    locked_folder,
    open_records,
    prepare_folder,
    refuse_changed_input,
)
from layertap.datasets.running import run_records
from layertap.datasets.sharing import refuse_unless_causal
from layertap.datasets.tokenizing import Kept
from layertap.datasets.verify import PartReport
from layertap.datasets.writer import Compression, DatasetWriter, ShardOptions
from layertap.errors import HiddenStatesError, OptionError
from layertap.files.format import COMPRESSION
from layertap.files.paths import whole_path
from layertap.llm import LLM

_MOST_FAILURES_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How one run goes; with the model and the input, these decide the rows."""

    layers: LayersLike
    layout: Layout = "shards"
    save_dtype: str | None = None
    """Dtype of the saved rows; default the compute dtype."""
    add_generation_prompt: bool = False
    """End each chat with the header of the assistant's next turn."""
    loss_mask: bool = True
    """Find the trained tokens of each chat; a chat whose turns can't be told fails."""
    positions: Kept = "all"
    """`trained`: keep only the rows of trained tokens, and the row before each run of them, which predicts its first."""
    regenerate: RegenerateOptions | None = None
    """Let the model answer first, and take the states of what it said; None: of what the input holds."""
    template_date: date | None = None
    """What chat templates that print today's date get; default the date of the set's first run."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further variables of the chat template, as JSON holds them: `{"enable_thinking": False}`."""
    shards: ShardOptions = field(default_factory=ShardOptions)
    share_prefixes: bool = False
    """Compute and store the rows of what samples near one another have in common at their beginning only once."""
    compress: bool = False
    """Store rows in compressed blocks, lossless; reading decompresses them."""
    check_rows: bool = True
    """Check all rows of finished samples before going on; otherwise only index, headers and sizes."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise OptionError(f"layout: {self.layout!r} is none of {', '.join(LAYOUTS)}")
        if self.save_dtype is not None and self.save_dtype not in SAVE_DTYPES:
            raise OptionError(f"save_dtype: {self.save_dtype!r} is none of {', '.join(SAVE_DTYPES)}")
        if self.positions not in ("all", "trained"):
            raise OptionError(f"positions: {self.positions!r} is none of all, trained")
        if self.positions == "trained" and not self.loss_mask:
            raise OptionError("positions: 'trained' needs loss masks; leave loss_mask on")
        if self.regenerate is not None and self.add_generation_prompt:
            raise OptionError(
                "add_generation_prompt: with regenerate every chat ends with an answer, not with a header"
            )
        if self.share_prefixes:
            self._check_sharing()
        self._check_template_kwargs()

    def _check_template_kwargs(self) -> None:
        given = self.chat_template_kwargs
        if given is None:
            return
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise OptionError(f"chat_template_kwargs: expected names with values, got {given!r}")
        trouble = trouble_with(given)
        if trouble is not None:
            raise OptionError(trouble)
        try:
            json.dumps(dict(given), allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise OptionError(f"chat_template_kwargs: they stand in the manifest, as JSON: {exc}") from exc

    def _check_sharing(self) -> None:
        if self.layout != "shards":
            raise OptionError("share_prefixes: layout 'files' gives each sample a file of its own; take 'shards'")
        if self.positions != "all":
            raise OptionError(
                "share_prefixes: with positions 'trained' a beginning doesn't have the first rows of the whole"
            )
        if self.regenerate is not None:
            raise OptionError(
                "share_prefixes: answers that are made in the run can't be compared before; leave regenerate out"
            )


@dataclass(slots=True, kw_only=True)
class RunReport:
    """What a run did. It is filled while the run goes on, so that progress can be shown."""

    folder: Path
    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    """Of rows."""
    num_skipped: int = 0
    """Samples that were done already."""
    num_unshown: int = 0
    """Regenerated answers that the chat template shows with other tokens, and that are therefore not trained."""
    num_failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(where, reason) of the first 1000; all are on record in the data set."""
    damaged: list[str] = field(default_factory=list)
    """What was found damaged, set aside and computed again."""
    stopped: bool = False
    """The run was asked to stop before the end of the input."""
    num_shared: int = 0
    """Samples whose first rows, or all, are those of another one (`share_prefixes`)."""
    num_shared_tokens: int = 0
    compression: Compression = field(default_factory=Compression)
    """Of the shards that this run closed (`compress`)."""
    seconds: float = 0.0

    def note_failure(self, where: str, reason: str) -> None:
        """Count an input that failed."""
        self.num_failed += 1
        if len(self.failures) < _MOST_FAILURES_KEPT:
            self.failures.append((where, reason))

    @property
    def num_seen(self) -> int:
        """Records of the input that are through."""
        return self.num_samples + self.num_skipped + self.num_failed


def extract_dataset(
    llm: LLM,
    source: InputFile,
    folder: str | Path,
    options: RunOptions,
    *,
    on_start: Callable[[RunReport], None] | None = None,
    on_checked: Callable[[PartReport], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunReport:
    """Extract the hidden states of an input file into a data set; continue one that an earlier run left.

    Args:
        llm: the model.
        source: the input.
        folder: the data set; made if it isn't there.
        options: layers, layout, ...
        on_start: gets the report before the first sample; it is updated while the run goes on.
        on_checked: called for each part of an existing set that was verified.
        should_stop: asked before each prompt; true ends the run in good order.

    Returns:
        The report; prompts that failed are listed in it, and didn't stop the others.

    Raises:
        OptionError: an option can't be honoured, or the folder holds rows that were made differently.
        TargetExistsError: another job writes to the folder.
        StoreFullError: the disk is full. Finished samples are kept, as after every other error.
    """
    folder = whole_path(folder)
    options = replace(options, template_date=options.template_date or known_date(folder))
    manifest = make_manifest(llm, source, options)
    report = RunReport(folder=folder)
    started = time.monotonic()
    with locked_folder(folder):
        prepared = prepare_folder(folder, manifest, check_rows=options.check_rows, on_part=on_checked)
        report.damaged = prepared.damaged
        refuse_changed_input(source, prepared.done)
        if options.share_prefixes:
            refuse_unless_causal(llm, manifest.rows.layers)
        if on_start is not None:
            on_start(report)
        try:
            _run(llm, source, options, prepared, report, should_stop)
        finally:
            report.seconds = time.monotonic() - started
        leave_lookup(folder, prepared.manifest.id)
    return report


def known_date(folder: Path) -> date | None:
    """The date that the set's first run gave to its template."""
    try:
        known = read_manifest(folder).rows.options.get("template_date")
    except HiddenStatesError:
        return None  # whatever is wrong is said when the folder is made ready
    return None if known is None else date.fromisoformat(known)


def leave_lookup(folder: Path, dataset_id: str) -> None:
    """Leave what makes opening fast."""
    # opening is slower without it, nothing else
    with contextlib.suppress(OSError, HiddenStatesError):
        write_cache(folder, dataset_id)


def make_manifest(llm: LLM, source: InputFile, options: RunOptions) -> Manifest:
    """Say what the rows of a run depend on.

    Raises:
        LayerError: a layer doesn't exist.
        OptionError: rows of the model's width can't be saved in this dtype.
    """
    info = llm.info
    slot_bytes(options.save_dtype or info.dtype, info.hidden_size)
    tokenizer = llm.get_tokenizer()
    identity = RowIdentity(
        # so that it is found again from another folder
        model=os.path.abspath(info.model) if os.path.exists(info.model) else info.model,
        revision=info.revision,
        model_fingerprint=model_fingerprint(info.model, info.revision),
        tokenizer_hash=tokenizer_hash(tokenizer),
        chat_template_hash=template_hash(tokenizer),
        layers=resolve_layers(options.layers, info.num_layers),
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        save_dtype=options.save_dtype or info.dtype,
        compute_dtype=info.dtype,
        quantization=info.quantization,
        residual=info.residual,
        engine=info.engine,
        engine_version=info.engine_version,
        options={
            "add_generation_prompt": options.add_generation_prompt,
            "loss_mask": options.loss_mask,
            "positions": options.positions,
            "regenerate": options.regenerate and options.regenerate.identity(info.generation_defaults),
            "template_date": _template_date(tokenizer, options),
            "chat_template_kwargs": dict(options.chat_template_kwargs or {}) or None,
            "share_prefixes": options.share_prefixes or None,  # sets that were made before the option have no entry
            "compress": COMPRESSION if options.compress else None,
            "input_format": source.format,
            "field": source.field,
            "shard": None if source.share[1] == 1 else f"{source.share[0]}/{source.share[1]}",
            "text_unit": source.text_unit if source.format == "text" else None,
        },
    )
    made_by = {
        "layertap_version": __version__,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return Manifest(rows=identity, layout=options.layout, input_name=source.path.name, made_by=made_by)


def _template_date(tokenizer: Any, options: RunOptions) -> str | None:
    """The date that the chat template prints; None where it prints none."""
    if "strftime_now" not in str(getattr(tokenizer, "chat_template", None)):
        return None
    return (options.template_date or date.today()).isoformat()


def _run(
    llm: LLM,
    source: InputFile,
    options: RunOptions,
    prepared: Prepared,
    report: RunReport,
    should_stop: Callable[[], bool],
) -> None:
    with DatasetWriter(report.folder, prepared.manifest, options.shards) as writer:
        report.compression = writer.compression
        records = counted(source, prepared.done, report)
        run_records(llm, records, options, prepared.manifest, writer, report, should_stop)


def counted(source: InputFile, done: Done, report: RunReport) -> Iterator[Record]:
    """Pass on the records that aren't done, and count the others."""
    seen = 0
    for record in open_records(source, done):
        # records between two that are open were done before
        report.num_skipped += (record.index - seen) // source.share[1]
        seen = record.index + 1
        yield record
    report.num_skipped = len(done)
