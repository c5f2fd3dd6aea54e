"""Records through a model into a writer: tokenized as the engine asks for them, run together, each with its own end."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from layertap.capture.spans import Spans
from layertap.datasets.inputs import BrokenRecord, InputRecord, Record
from layertap.datasets.manifest import Manifest
from layertap.datasets.regenerating import BATCH, Answering, RegenerateOptions
from layertap.datasets.sharing import WINDOW, hosts_of
from layertap.datasets.tokenizing import RecordTokenizer, trained_rows
from layertap.datasets.writer import DatasetWriter, Sample
from layertap.errors import ExtractionError, LayertapError
from layertap.llm import LLM
from layertap.outputs import Extracted
from layertap.prompts import Prompt

if TYPE_CHECKING:
    from layertap.datasets.extraction import RunOptions, RunReport


def template_kwargs(manifest: Manifest) -> dict[str, Any]:
    """What the chat template is given beside the chat: what the run was given for it, and a clock that stands still, so that no
    day has other tokens."""
    options = manifest.rows.options
    given = dict(options.get("chat_template_kwargs") or {})
    known = options.get("template_date")
    return given if known is None else {**given, "strftime_now": datetime.fromisoformat(known).strftime}


def run_records(
    llm: LLM,
    records: Iterable[Record],
    options: "RunOptions",
    manifest: Manifest,
    writer: DatasetWriter,
    report: "RunReport",
    should_stop: Callable[[], bool],
) -> None:
    """Run records and write their samples; what fails is put on record.

    Args:
        llm: the model.
        records: what is to be run.
        options: of the run.
        manifest: of the set.
        writer: takes the samples.
        report: is filled.
        should_stop: asked before each prompt.
    """
    feed = _Feed(llm, records, options, manifest, report, writer, should_stop)
    batches: Iterable[Iterable[Prompt]] = [feed] if options.regenerate is None else feed.answered(options.regenerate)
    if options.share_prefixes:
        batches = [feed.sharing()]
    alone: list[Record] = []
    for batch in batches:
        results = llm.extract(
            iter(batch),
            layers=manifest.rows.layers,
            save_dtype=options.save_dtype,
            share_prefixes=options.share_prefixes,
        )
        try:
            with contextlib.closing(results):
                for result in results:
                    _add(writer, feed.running.pop(result.index), result, report, options.positions)
        except ExtractionError as exc:
            for number, reason in exc.failures:
                failed = feed.running.pop(number)
                feed.fail(failed.record, reason)
                alone += [one.record for one in failed.beginnings]
    if alone:  # what the longer one failed of needn't be the matter with its beginnings
        run_records(llm, alone, replace(options, share_prefixes=False), manifest, writer, report, should_stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """What is known of a prompt beside its rows."""

    record: InputRecord
    mask: Spans | None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    num_tokens: int = 0
    beginnings: "tuple[_Running, ...]" = ()


def _add(
    writer: DatasetWriter,
    running: _Running,
    result: Extracted,
    report: "RunReport",
    positions: str,
) -> None:
    record, mask = running.record, running.mask
    kept = result.result
    if kept.rows is None:
        raise TypeError("rows that were to be kept in memory went to a file")
    rows = kept.rows.reshape(len(kept.token_ids), -1)
    token_ids = kept.token_ids
    spans: Spans | None = None
    if positions == "trained" and mask is not None:
        spans, mask = trained_rows(mask)
        chosen = np.concatenate([np.arange(start, end) for start, end in spans])
        rows, token_ids = rows[chosen], token_ids[chosen]
    finish_reason = kept.info.facts.get("finish_reason", "prefill")
    whole = Sample(
        index=record.index,
        source_hash=record.source_hash,
        sample_id=record.sample_id,
        rows=rows,
        token_ids=token_ids,
        prompt_tokens=kept.info.prompt_len if running.prompt_tokens is None else running.prompt_tokens,
        finish_reason=running.finish_reason or finish_reason,
        loss_mask=mask,
        positions=spans,
    )
    beginnings = [
        Sample(
            index=one.record.index,
            source_hash=one.record.source_hash,
            sample_id=one.record.sample_id,
            rows=rows[: one.num_tokens],
            token_ids=token_ids[: one.num_tokens],
            prompt_tokens=one.num_tokens,
            finish_reason=finish_reason,
            loss_mask=one.mask,
        )
        for one in running.beginnings
    ]
    for sample in (whole, *beginnings):
        shared = writer.add(sample)
        report.num_shared += shared > 0
        report.num_shared_tokens += shared
        report.num_samples += 1
        report.num_tokens += len(sample.token_ids)
        report.num_bytes += sample.rows.nbytes * (len(sample.token_ids) - shared) // max(1, len(sample.token_ids))


class _Feed:
    """The prompts that are still to be run, tokenized one by one as the engine asks for them."""

    def __init__(
        self,
        llm: LLM,
        records: Iterable[Record],
        options: "RunOptions",
        manifest: Manifest,
        report: "RunReport",
        writer: DatasetWriter,
        should_stop: Callable[[], bool],
    ) -> None:
        self.running: dict[int, _Running] = {}
        """By the place in what the engine was given."""
        self._llm = llm
        self._records = records
        self._loss_mask = options.loss_mask
        self._report = report
        self._writer = writer
        self._should_stop = should_stop
        self._tokenizer = RecordTokenizer(
            llm.info,
            llm.get_tokenizer(),
            add_generation_prompt=options.add_generation_prompt or options.regenerate is not None,
            loss_mask=options.loss_mask,
            positions=options.positions,
            template_kwargs=template_kwargs(manifest),
        )

    def __iter__(self) -> Iterator[Prompt]:
        for place, (record, prompt, mask) in enumerate(self._tokenized()):
            self.running[place] = _Running(record=record, mask=mask)
            yield prompt

    def sharing(self) -> Iterator[Prompt]:
        """The prompts that aren't the beginning of another one in the same window of the input, sorted by their tokens."""
        place = 0
        tokenized = self._tokenized()
        while window := list(islice(tokenized, WINDOW)):
            sequences = [list(prompt.token_ids) for _, prompt, _ in window]
            hosts = hosts_of(sequences)
            beginnings: dict[int, list[_Running]] = {}
            for (record, prompt, mask), host in zip(window, hosts, strict=True):
                if host is not None:
                    one = _Running(record=record, mask=mask, num_tokens=len(prompt.token_ids))
                    beginnings.setdefault(host, []).append(one)
            for number in sorted(range(len(window)), key=sequences.__getitem__):
                record, prompt, mask = window[number]
                if hosts[number] is not None:
                    continue
                if self._should_stop():
                    self._report.stopped = True
                    return
                found = tuple(beginnings.get(number, ()))
                self.running[place] = _Running(record=record, mask=mask, beginnings=found)
                place += 1
                yield prompt

    def _tokenized(self) -> Iterator[tuple[InputRecord, Prompt, Spans | None]]:
        for record in self._readable():
            try:
                prompt, mask = self._tokenizer.read(record)
            except LayertapError as exc:
                self.fail(record, f"{record.where}: {exc}")
                continue
            yield record, prompt, mask

    def answered(self, options: RegenerateOptions) -> Iterator[list[Prompt]]:
        """The records after the model has answered them, some at a time."""
        answering = Answering(self._llm, options, self._tokenizer, loss_mask=self._loss_mask)
        records = self._readable()
        while batch := list(islice(records, BATCH)):
            prompts: list[Prompt] = []
            for done in answering.answer(batch):
                if done.error is not None:
                    self.fail(done.record, f"{done.record.where}: {done.error}")
                    continue
                self._report.num_unshown += done.num_unshown
                self.running[len(prompts)] = _Running(
                    record=done.record,
                    mask=done.mask,
                    prompt_tokens=done.prompt_tokens,
                    finish_reason=done.finish_reason,
                )
                prompts.append(Prompt(token_ids=done.token_ids))
            yield prompts

    def _readable(self) -> Iterator[InputRecord]:
        for record in self._records:
            if self._should_stop():
                self._report.stopped = True
                return
            if isinstance(record, BrokenRecord):
                self.fail(record, str(record.error))
            else:
                yield record

    def fail(self, record: Record, reason: str) -> None:
        """Put a failed input on record."""
        self._writer.add_failure(
            index=record.index, source_hash=record.source_hash, sample_id=record.sample_id, reason=reason
        )
        self._report.note_failure(record.where, reason)
