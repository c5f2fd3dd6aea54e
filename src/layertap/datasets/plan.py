"""What a run would take, before it runs: tokens, disk, memory, time, and what options would save.

Reads the configuration, the tokenizer and a sample of the input; no weights, unless a measurement is asked for.
"""

import contextlib
import itertools
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layertap.capture.layers import resolve_layers
from layertap.capture.options import StoreOptions
from layertap.capture.request import FP8, SAVE_DTYPES, slot_bytes
from layertap.datasets.counting import estimate_records
from layertap.datasets.extraction import RunOptions
from layertap.datasets.index import spans_of
from layertap.datasets.inputs import InputFile, InputRecord, Record
from layertap.datasets.prefixes import StoredRows
from layertap.datasets.rounding import RoundingError, rounding_errors
from layertap.datasets.sharing import WINDOW
from layertap.datasets.tokenizing import RecordTokenizer, trained_rows
from layertap.datasets.writer import Compression
from layertap.engines.base import ModelInfo
from layertap.errors import ModelError, PromptError
from layertap.files.blocks import compress, rows_of_block

if TYPE_CHECKING:
    from layertap.llm import LLM
    from layertap.prompts import Prompt

_READ_RECORDS = 200_000
_SHARING_WINDOWS = 2
_COMPRESSED_SAMPLES = 32
_FIRST_MEASURED_TOKENS = 512
# a token id, a digest in the header, and the sample's line of the index
_TOKEN_BYTES = 8 + 10.7
_INDEX_BYTES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEstimate:
    """The input, extrapolated from a sample."""

    num_records: int
    is_exact: bool
    """All records were counted and tokenized."""
    num_sampled: int
    share_failing: float
    failures: dict[str, int]
    """Reason -> how many of the sample, of the first few."""
    mean_tokens: float
    longest: int
    tokens: int
    """Of all records that can be run."""
    tokens_error: int
    """Half the width of the 95 % interval of `tokens`."""
    trained_rows: int | None
    """Rows that `positions="trained"` would keep; None where the sample has no masks."""

    @property
    def num_runnable(self) -> int:
        """Records that can be run."""
        return round(self.num_records * (1 - self.share_failing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would take."""

    info: ModelInfo
    layers: tuple[int, ...]
    save_dtype: str
    input: InputEstimate
    num_rows: int
    """Rows that are kept."""
    disk_bytes: int
    disk_free: int
    weights_bytes: int
    """Of the blocks that are run, and the embeddings; unquantized, in the compute dtype."""
    all_weights_bytes: int
    num_blocks: int
    """Blocks that are run."""
    rows_budget: int
    """The most bytes of rows that wait in host memory."""
    savings: list[tuple[str, int]]
    """What else could be chosen, and the bytes on disk that it would take."""
    tokens_per_second: float | None = None
    compression: Compression | None = None
    """What `compress` made of the sample's rows; None where it wasn't measured."""
    rounding: list[RoundingError] = field(default_factory=list)
    """What saving in `save_dtype` changes, by layer; where it was measured and isn't the compute dtype."""

    @property
    def seconds(self) -> float | None:
        """Time of the run, where it was measured."""
        return None if not self.tokens_per_second else self.input.tokens / self.tokens_per_second


def make_plan(
    model: str,
    source: InputFile,
    options: RunOptions,
    out: Path,
    *,
    sample: int = 1000,
    measure_seconds: float | None = None,
    **engine_options: Any,
) -> Plan:
    """Say what `extract_dataset` would take.

    Args:
        model: as for `LLM`.
        source: the input.
        options: the run's.
        out: where the data set would be, for the free space.
        sample: how many records are tokenized.
        measure_seconds: load the model and run the sample for so long, to know the time and what rounding changes.
        engine_options: `dtype`, `device`, `revision`, `tokenizer`, `trust_remote_code`, `max_model_len`, ...

    Raises:
        ModelError: configuration or tokenizer can't be read.
        LayerError: a layer doesn't exist.
        PromptError: nothing of the sample can be run.
    """
    info, tokenizer, weights = _read_model(model, engine_options)
    layers = resolve_layers(options.layers, info.num_layers)
    reader = RecordTokenizer(
        info,
        tokenizer,
        add_generation_prompt=options.add_generation_prompt,
        loss_mask=options.loss_mask,
        positions=options.positions,
        template_kwargs=options.chat_template_kwargs,
    )
    estimate, prompts = _estimate_input(source, reader, sample)
    save_dtype = options.save_dtype or info.dtype
    trained = estimate.trained_rows if options.positions == "trained" else None
    num_rows = estimate.tokens if trained is None else trained

    def disk(rows: int, num_layers: int, dtype: str) -> int:
        row_bytes = num_layers * slot_bytes(dtype, info.hidden_size) + _TOKEN_BYTES
        return round(rows * row_bytes + estimate.num_runnable * _INDEX_BYTES)

    savings = []
    if SAVE_DTYPES[save_dtype] > 2:
        savings.append(("--save-dtype bfloat16", disk(num_rows, len(layers), "bfloat16")))
    if save_dtype != FP8 and info.hidden_size % 8 == 0:
        savings.append((f"--save-dtype {FP8}", disk(num_rows, len(layers), FP8)))
    if options.positions == "all" and estimate.trained_rows is not None:
        savings.append(("--positions trained", disk(estimate.trained_rows, len(layers), save_dtype)))
    if options.positions == "all":
        shared = _share_of_beginnings(source, reader)
        if shared:
            savings.append(
                (
                    f"--share-prefixes (and computes up to {shared:.0%} less)",
                    disk(round(num_rows * (1 - shared)), len(layers), save_dtype),
                )
            )
    speed: float | None = None
    rounding: list[RoundingError] = []
    compression: Compression | None = None
    if measure_seconds is not None:
        speed, rounding, compression = _measure(model, prompts, layers, options, measure_seconds, engine_options)
        saved = 1 - compression.stored_bytes / compression.row_bytes
        rows_bytes = num_rows * len(layers) * slot_bytes(save_dtype, info.hidden_size)
        savings.append(("--compress", disk(num_rows, len(layers), save_dtype) - round(rows_bytes * saved)))
    if len(layers) > 1:
        savings.append(("each layer less", disk(num_rows, len(layers) - 1, save_dtype)))
    depth = max(layers)
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return Plan(
        info=info,
        layers=layers,
        save_dtype=save_dtype,
        input=estimate,
        num_rows=num_rows,
        disk_bytes=disk(num_rows, len(layers), save_dtype),
        disk_free=shutil.disk_usage(existing).free,
        weights_bytes=weights.up_to(depth),
        all_weights_bytes=weights.all_bytes,
        num_blocks=depth,
        rows_budget=StoreOptions().byte_budget(),
        savings=savings,
        tokens_per_second=speed,
        compression=compression,
        rounding=rounding,
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    all_bytes: int
    embeddings: int
    blocks: list[int]

    def up_to(self, depth: int) -> int:
        return self.embeddings + sum(self.blocks[:depth])


def _read_model(model: str, options: dict[str, Any]) -> tuple[ModelInfo, Any, _Weights]:
    import torch
    import transformers

    from layertap.capture.blocks import find_blocks
    from layertap.engines.transformers.load import open_model, open_tokenizer

    known = {name: options[name] for name in ("dtype", "device", "revision", "trust_remote_code") if name in options}
    source = open_model(model, **known)
    with torch.device("meta"):
        built: Any = source.model_class._from_config(source.config)
    blocks = find_blocks(built)
    size = source.dtype.itemsize

    def num_bytes(module: Any) -> int:
        return int(size) * sum(int(parameter.numel()) for parameter in module.parameters())

    text = source.text_config
    embeddings = built.get_input_embeddings()
    try:
        tokenizer = open_tokenizer(source, options.get("tokenizer"))
    except ModelError:
        tokenizer = None  # prompts may be token ids; others fail, and are said
    eos = getattr(text, "eos_token_id", None)
    info = ModelInfo(
        model=model,
        revision=source.revision,
        num_layers=blocks.num_layers,
        hidden_size=blocks.hidden_size or int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_model_len=options.get("max_model_len") or source.max_model_len,
        dtype=str(source.dtype).removeprefix("torch."),
        device=str(source.device),
        engine="transformers",
        engine_version=transformers.__version__,
        quantization=source.quantization,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (eos,)),
    )
    return info, tokenizer, _Weights(num_bytes(built), num_bytes(embeddings), [num_bytes(one) for one in blocks.blocks])


def _estimate_input(source: InputFile, reader: RecordTokenizer, sample: int) -> tuple[InputEstimate, list["Prompt"]]:
    chosen, num_read = _sampled(source, sample)
    if not chosen:
        raise PromptError(f"{source.path}: holds no records")
    lengths: list[int] = []
    prompts: list[Prompt] = []
    kept: list[int] = []
    failures: dict[str, int] = {}
    for record in chosen:
        try:
            if not isinstance(record, InputRecord):
                raise record.error
            prompt, mask = reader.read(record)
        except PromptError as exc:
            reason = str(exc)
            failures[reason] = failures.get(reason, 0) + 1
            continue
        prompts.append(prompt)
        lengths.append(len(prompt.token_ids))
        if mask is not None:
            kept.append(sum(end - start for start, end in trained_rows(mask)[0]))
    if not lengths:
        raise PromptError(f"{source.path}: none of {len(chosen)} records can be run; the first: {next(iter(failures))}")
    total = num_read if num_read < _READ_RECORDS else max(num_read, estimate_records(source) or num_read)
    runnable = total * len(lengths) / len(chosen)
    mean = sum(lengths) / len(lengths)
    spread = (sum((length - mean) ** 2 for length in lengths) / max(1, len(lengths) - 1)) ** 0.5
    is_exact = len(chosen) == total
    return (
        InputEstimate(
            num_records=total,
            is_exact=is_exact,
            num_sampled=len(chosen),
            share_failing=1 - len(lengths) / len(chosen),
            failures=dict(itertools.islice(failures.items(), 10)),
            mean_tokens=mean,
            longest=max(lengths),
            tokens=round(mean * runnable),
            tokens_error=0 if is_exact else round(1.96 * spread / len(lengths) ** 0.5 * runnable),
            trained_rows=round(sum(kept) / len(chosen) * total) if kept else None,
        ),
        prompts,
    )


def _share_of_beginnings(source: InputFile, reader: RecordTokenizer) -> float:
    """The share of tokens that `share_prefixes` would find in the first windows of the input: neighbours can't be drawn."""
    tokens = shared = 0
    records = itertools.islice(source, _SHARING_WINDOWS * WINDOW)
    while window := list(itertools.islice(records, WINDOW)):
        found: list[list[int]] = []
        for record in window:
            with contextlib.suppress(PromptError):
                if isinstance(record, InputRecord):
                    found.append(list(reader.read(record)[0].token_ids))
        stored, row = StoredRows(), 0
        for ids in map(np.asarray, sorted(found)):
            before = stored.find(ids)
            own = len(ids) - sum(end - start for start, end in before)
            stored.add(ids, spans_of(row, len(ids), before), own)
            row += own
        tokens += sum(map(len, found))
        shared += sum(map(len, found)) - row
    return shared / tokens if tokens else 0.0


def _sampled(source: InputFile, sample: int) -> tuple[list[Record], int]:
    """Draw records evenly from the first 200,000; also says how many there were."""
    draw = random.Random(0)
    chosen: list[Record] = []
    num_read = 0
    for record in itertools.islice(source, _READ_RECORDS):
        num_read += 1
        if len(chosen) < sample:
            chosen.append(record)
        elif (at := draw.randrange(num_read)) < sample:
            chosen[at] = record
    draw.shuffle(chosen)
    return chosen, num_read


def _measure(
    model: str,
    prompts: list["Prompt"],
    layers: tuple[int, ...],
    options: RunOptions,
    seconds: float,
    engine_options: dict[str, Any],
) -> tuple[float, list[RoundingError], Compression]:
    from layertap.llm import LLM

    with LLM(model, layers=layers, **engine_options) as llm:
        speed = _tokens_per_second(llm, prompts, layers, options, seconds)
        few = list(_first_tokens(prompts, round(speed * seconds)))
        saved = options.save_dtype
        rounding = [] if saved in (None, llm.info.dtype) else rounding_errors(llm, few, layers, saved)
        return speed, rounding, _try_compression(llm, few, layers, saved)


def _try_compression(
    llm: "LLM", prompts: list["Prompt"], layers: tuple[int, ...], save_dtype: str | None
) -> Compression:
    """Compress rows of the sample as a shard would."""
    found = Compression()
    for sample in llm.extract(itertools.islice(prompts, _COMPRESSED_SAMPLES), layers=layers, save_dtype=save_dtype):
        rows, info = sample.result.rows, sample.result.info
        if rows is None:
            raise TypeError("rows that were to be kept in memory went to a file")
        flat, step = rows.reshape(len(rows), -1), rows_of_block(info)
        started = time.thread_time()
        stored = sum(compress(flat[begin : begin + step], info).nbytes for begin in range(0, len(flat), step))
        found.add(flat.nbytes, stored, time.thread_time() - started)
    return found


def _tokens_per_second(
    llm: "LLM", prompts: list["Prompt"], layers: tuple[int, ...], options: RunOptions, seconds: float
) -> float:
    """Run ever more tokens while there is time; the last and largest part counts, those before it warm up."""
    started = time.monotonic()
    endless = itertools.cycle(prompts)
    wanted = _FIRST_MEASURED_TOKENS
    while True:
        began = time.monotonic()
        part = _first_tokens(endless, wanted)
        tokens = sum(
            len(sample.result.token_ids) for sample in llm.extract(part, layers=layers, save_dtype=options.save_dtype)
        )
        now = time.monotonic()
        if now - started + 2 * (now - began) > seconds:
            return tokens / (now - began)
        wanted *= 2


def _first_tokens(prompts: Iterable["Prompt"], tokens: int) -> Iterator["Prompt"]:
    """The first prompts, until they have so many tokens; at least one."""
    for prompt in prompts:
        yield prompt
        tokens -= len(prompt.token_ids)
        if tokens <= 0:
            return
