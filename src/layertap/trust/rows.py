"""Rows of an engine beside those of plain transformers in float32: how far, where, and through the model's own head."""

from collections.abc import Sequence

import numpy as np

from layertap.datasets.recompute import Reference
from layertap.errors import LayertapError
from layertap.files.values import Floats
from layertap.llm import LLM
from layertap.trust.findings import LayerError, Report

_TEXTS = (
    "The capital of France is Paris, and the capital of Japan is",
    "def add(a, b):\n    return a +",
    "Hidden states are what a transformer carries from block to block; to take them out without changing them is the whole art, "
    "and to know that they are the right ones is the other half of it.",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
)
MAX_TOKENS = 12
_RIGHT_LAYER = 0.5
"""Rows further than this from their own layer and nearer to another's are that other's."""


def some_prompts(llm: LLM) -> list[list[int]]:
    """Tokens of a few texts; of random ones where there is no tokenizer."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(5, llm.info.vocab_size - 1, n).tolist() for n in (13, 9, 40, 50)]
    limit = llm.info.max_model_len - MAX_TOKENS - 1
    return [list(tokenizer(text)["input_ids"])[:limit] for text in _TEXTS]


def against_plain(
    report: Report,
    llm: LLM,
    prompts: list[list[int]],
    rows: list[Floats],
    tolerance: float,
    *,
    trust_remote_code: bool,
) -> Reference | None:
    """Compare rows of prompts with plain transformers, which is returned; None with a note where it cannot be asked."""
    try:
        reference = Reference(llm.info.model, revision=llm.info.revision, trust_remote_code=trust_remote_code)
    except LayertapError as exc:
        report.add("rows", "reference", "note", f"plain transformers can't be asked: {exc}")
        return None
    truth = [reference.rows(ids, range(llm.info.num_layers + 1)) for ids in prompts]
    _by_layer(report, llm, prompts, rows, truth, tolerance)
    _right_layers(report, rows, truth)
    _through_the_head(report, reference, prompts, rows, tolerance)
    return reference


def relative_errors(rows: Sequence[Floats], truth: Sequence[Floats]) -> Floats:
    """Relative errors [tokens of all prompts, layers]."""
    given, exact = np.concatenate(rows), np.concatenate(truth)
    lengths = np.maximum(np.linalg.norm(exact, axis=-1), np.finfo(np.float32).tiny)
    found: Floats = np.nan_to_num(np.linalg.norm(given - exact, axis=-1) / lengths, nan=np.inf)
    return found


def _judge(errors: Floats, tolerance: float) -> bool:
    """In 16 bits single rows may be far off where a router or a huge value tips over: there the median of a layer counts."""
    return bool((errors.max() if tolerance < 1e-3 else np.median(errors, axis=0).max()) <= tolerance)


def compare(report: Report, name: str, errors: Floats, tolerance: float, what: str) -> None:
    """Note whether errors are within the tolerance."""
    good = _judge(errors, tolerance)
    text = f"{what}: largest relative error {errors.max():.1e} (tolerance {tolerance:g})"
    report.add("rows", name, "good" if good else "bad", text)


def _by_layer(
    report: Report, llm: LLM, prompts: list[list[int]], rows: list[Floats], truth: list[Floats], tolerance: float
) -> None:
    """Note the errors of each layer with its worst token, and whether they are within the tolerance."""
    errors = relative_errors(rows, truth)
    tokens = [(position, token) for ids in prompts for position, token in enumerate(ids)]
    tokenizer = llm.get_tokenizer()
    for layer in range(errors.shape[1]):
        worst = int(errors[:, layer].argmax())
        position, token = tokens[worst]
        text = str(token) if tokenizer is None else repr(tokenizer.decode([token]))
        median = float(np.median(errors[:, layer]))
        report.layers.append(LayerError(layer, median, float(errors[worst, layer]), position, text, tolerance))
    what = f"{len(errors)} rows of {errors.shape[1]} layers and plain transformers in float32"
    compare(report, "against the reference", errors, tolerance, what)


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
