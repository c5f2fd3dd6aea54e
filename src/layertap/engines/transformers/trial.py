"""Which way a model may generate is found out by trying it, never by its name and never by whether it refuses.

A few prompts, short beside long and longer than one chunk, are generated greedily, and every row of every layer and every
token is compared with plain forwards of the model, one sequence at a time, without a cache, with eager attention. The first
way that agrees is taken: batched; one at a time with the model's own cache; one at a time without a cache, which is the
reference itself; the first two with the attention that the model was loaded with, else with eager attention. Some models
give other tokens when batched without any error, some drop a soft cap or a bias in torch's attention, and others raise.
A model whose rows change when tokens are appended (an encoder) has no rows of generated tokens and is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layertap.assembly import Rows
from layertap.capture.blocks import Blocks, find_blocks
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.transformers.batching import BatchedStepper
from layertap.engines.transformers.internals import private_view, set_attention
from layertap.engines.transformers.row_tap import Chunk, RowTap
from layertap.engines.transformers.single import SingleStepper
from layertap.engines.transformers.stepping import LiveSequence, Stepper

__all__ = ["Bench", "Stepping", "Verdict", "find_way"]

Stepping = Literal["batched", "single", "recompute", "refused"]

_NUM_TOKENS = 5
_LENGTHS = (4, 19, 35)
_CHUNK = 16
_LONGEST = 1100
_ROW_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model generates, and why.

    Attributes:
        way: "batched", "single" (one sequence at a time), "recompute" (the same without a cache) or "refused".
        attention: the attention implementation that it runs with.
        reason: what was measured.
        row_error: largest relative error of a row in the way that was taken.
    """

    way: Stepping
    attention: str
    reason: str
    row_error: float

    def __str__(self) -> str:
        return f"{self.way} ({self.attention}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Bench:
    """A model to be tried; the original is never touched, everything runs on views of it.

    Attributes:
        model: the model.
        num_layers: blocks of its decoder.
        hidden_size: width of the stream.
        vocab_size: ids are below it.
    """

    model: nn.Module
    num_layers: int
    hidden_size: int
    vocab_size: int

    def view(self, attention: str) -> tuple[nn.Module, Blocks]:
        """A private view that runs with `attention`, and its blocks."""
        model = private_view(self.model)
        set_attention(model, attention)
        return model, find_blocks(model)

    @property
    def attentions(self) -> list[str]:
        """Implementations to try, the faster first."""
        own = str(getattr(self.model.config, "_attn_implementation", None) or "eager")
        return list(dict.fromkeys((own, "eager")))


@dataclass(frozen=True, slots=True)
class _Outcome:
    row_error: float
    trouble: str | None


def find_way(bench: Bench, *, max_len: int) -> Verdict:
    """Try the ways in the order of their speed."""
    dtype = next(bench.model.parameters()).dtype
    prompts = _prompts(bench, max_len - _NUM_TOKENS)
    troubles: list[str] = []
    ways: tuple[tuple[Stepping, str], ...] = (
        *(("batched", attention) for attention in bench.attentions),
        *(("single", attention) for attention in bench.attentions),
        ("recompute", "eager"),
    )
    with torch.inference_mode():
        obstacle = _obstacle(bench, prompts[-1], dtype)
        if obstacle is not None:
            return Verdict("refused", "eager", obstacle, float("inf"))
        for way, attention in ways:
            outcome = _try(bench, way, attention, prompts, dtype)
            if outcome.trouble is None:
                what = f"rows within {outcome.row_error:.1e} of plain forwards, same tokens"
                return Verdict(way, attention, "; ".join([*troubles, what]), outcome.row_error)
            troubles.append(f"not {way} ({attention}: {outcome.trouble})")
    return Verdict("refused", "eager", "; ".join(troubles), float("inf"))


def _obstacle(bench: Bench, prompt: list[int], dtype: torch.dtype) -> str | None:
    """Why the model can't generate with rows at all: its blocks don't carry a row a token, or it isn't causal."""
    try:
        # What a model does to itself in its first forward (RWKV scales its weights) must be done before it is copied.
        device = next(bench.model.parameters()).device
        bench.model(input_ids=torch.tensor([prompt[:1]], device=device), use_cache=False)
        model, found = bench.view("eager")
        tap = RowTap(model, found)
        try:
            rows, _ = _plain(bench, model, tap, prompt)
            first, _ = _plain(bench, model, tap, prompt[: len(prompt) // 2])
        finally:
            tap.close()
    except Exception as error:  # noqa: BLE001 - it is the verdict
        return f"a plain forward failed: {_first_line(error)}"
    moved = _row_error(first, rows[: len(first)], torch.float32)
    if not moved <= 10 * _ROW_TOLERANCE[dtype]:
        return f"rows move by {moved:.1e} when tokens are appended: the model isn't causal"
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _row_error(given: NDArray[np.float32], expected: NDArray[np.float32], dtype: torch.dtype) -> float:
    """The largest relative error of a row; in half precision all but the worst 5 % (a router may flip)."""
    errors = np.linalg.norm(given - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), 1e-12)
    return float(errors.max() if dtype == torch.float32 else np.quantile(errors, 0.95))


def _prompts(bench: Bench, longest: int) -> list[list[int]]:
    """Prompts that cross chunks, and the model's own thresholds (window, chunk, rotary scaling) where they are near."""
    lengths = {min(length, longest) for length in _LENGTHS}
    config: Any = bench.model.config
    text = config.get_text_config(decoder=True)
    for name in ("sliding_window", "attention_chunk_size", "original_max_position_embeddings"):
        threshold = getattr(text, name, None)
        if isinstance(threshold, int) and threshold > 0 and max(_LENGTHS) < threshold + 9 <= min(longest, _LONGEST):
            lengths.add(threshold + 9)
    generator = torch.Generator().manual_seed(0)
    low = min(8, bench.vocab_size - 1)
    return [
        torch.randint(low, bench.vocab_size, (length,), generator=generator).tolist()
        for length in sorted(lengths)
        if length > 0
    ]


def _try(bench: Bench, way: Stepping, attention: str, prompts: Sequence[list[int]], dtype: torch.dtype) -> _Outcome:
    try:
        with _stepper(bench, way, attention, prompts) as stepper:
            outputs, rows = _generate(bench, stepper, prompts)
        return _compare(bench, prompts, outputs, rows, dtype)
    except Exception as error:  # noqa: BLE001 - any failure means: not this way
        return _Outcome(float("inf"), _first_line(error))


@contextmanager
def _stepper(bench: Bench, way: Stepping, attention: str, prompts: Sequence[list[int]]) -> Iterator[Stepper]:
    model, found = bench.view(attention)
    longest = max(len(prompt) for prompt in prompts) + _NUM_TOKENS + 1
    stepper: Stepper
    if way == "batched":
        room = sum(len(prompt) + _NUM_TOKENS + 32 for prompt in prompts) * 2
        stepper = BatchedStepper(model, found, kv_tokens=room, max_batch_tokens=_CHUNK, max_sequences=8, page_size=16)
    else:
        stepper = SingleStepper(model, found, use_cache=way == "single", max_len=longest)
    try:
        yield stepper
    finally:
        stepper.close()


def _spec(bench: Bench, prompt_len: int, max_tokens: int) -> CaptureSpec:
    return CaptureSpec(
        layers=tuple(range(bench.num_layers + 1)),
        dtype="float32",
        hidden_size=bench.hidden_size,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        window=Window(include_output=True),
    )


def _generate(
    bench: Bench, stepper: Stepper, prompts: Sequence[list[int]]
) -> tuple[dict[str, list[int]], dict[str, dict[int, NDArray[np.float32]]]]:
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    rows: dict[str, dict[int, NDArray[np.float32]]] = {key: {} for key in outputs}
    for key, prompt in zip(outputs, prompts, strict=True):
        spec = _spec(bench, len(prompt), _NUM_TOKENS)
        stepper.add(LiveSequence(key, list(prompt), len(prompt) + _NUM_TOKENS + 1, spec))
    running = set(outputs)

    def choose(keys: Sequence[str], logits: Tensor) -> list[int]:
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for key, token in zip(keys, tokens, strict=True):
            outputs[key].append(token)
        return tokens

    longest = max(len(prompt) for prompt in prompts)
    for _ in range((longest + _NUM_TOKENS + 4) * (len(prompts) + 1)):
        step = stepper.step(choose)
        if step.failed:
            raise next(iter(step.failed.values()))
        for key, chunk in step.rows:
            _keep(rows[key], chunk)
        for key in [key for key in running if len(outputs[key]) >= _NUM_TOKENS]:
            running.discard(key)
            stepper.remove(key)
        if not running:
            return outputs, rows
    raise RuntimeError("generation didn't come to an end")


def _keep(rows: dict[int, NDArray[np.float32]], chunk: Rows) -> None:
    values = chunk.data.view(np.float32)
    for i in range(len(chunk.input_ids)):
        rows[chunk.start + i] = values[i].copy()


def _compare(
    bench: Bench,
    prompts: Sequence[list[int]],
    outputs: dict[str, list[int]],
    rows: dict[str, dict[int, NDArray[np.float32]]],
    dtype: torch.dtype,
) -> _Outcome:
    model, found = bench.view("eager")
    tap = RowTap(model, found)
    worst = 0.0
    try:
        for (key, output), prompt in zip(outputs.items(), prompts, strict=True):
            expected, logits = _plain(bench, model, tap, [*prompt, *output[:-1]])
            if sorted(rows[key]) != list(range(len(expected))):
                return _Outcome(float("inf"), f"rows of a prompt of {len(prompt)} tokens are missing")
            given = np.stack([rows[key][position] for position in range(len(expected))])
            error = _row_error(given, expected, dtype)
            if not error <= _ROW_TOLERANCE[dtype]:
                return _Outcome(error, f"rows of a prompt of {len(prompt)} tokens are off by {error:.1e}")
            worst = max(worst, error)
            gaps = _gaps(logits[len(prompt) - 1 :], output)
            if not float(gaps.max()) <= _LOGIT_TOLERANCE[dtype]:
                return _Outcome(error, f"other tokens than plain forwards for a prompt of {len(prompt)} tokens")
    finally:
        tap.close()
    return _Outcome(worst, None)


def _gaps(logits_TV: Tensor, output: Sequence[int]) -> Tensor:
    """How far below the best logit each token was, as a share of the range of logits."""
    best, low = logits_TV.amax(dim=-1), logits_TV.amin(dim=-1)
    chosen = logits_TV.gather(1, torch.tensor(output, device=logits_TV.device).unsqueeze(1)).squeeze(1)
    return (best - chosen) / (best - low).clamp_min(1e-12)


def _plain(bench: Bench, model: nn.Module, tap: RowTap, ids: list[int]) -> tuple[NDArray[np.float32], Tensor]:
    tap.expect([Chunk("", _spec(bench, len(ids), 0), 0, len(ids), 0)])
    device = next(model.parameters()).device
    outputs = model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    ((_, chunk),) = tap.collect(1)
    logits: Tensor = outputs.logits[0].float()
    return chunk.data.view(np.float32), logits
