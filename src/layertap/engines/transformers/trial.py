"""Which way a model may generate is found out by trying it, never by its name and never by whether it refuses.

A few prompts, short beside long and longer than one chunk, are generated greedily, and every row of every layer and every
token is compared with plain forwards of the model, one sequence at a time, without a cache, with eager attention. The first
way that agrees is taken: batched; one at a time with the model's own cache; one at a time without a cache, which is the
reference itself; the first two with the attention that the model was loaded with, else with eager attention. Some models
give other tokens when batched without any error, some drop a soft cap or a bias in torch's attention, and others raise.
A model whose rows change when tokens are appended (an encoder) has no rows of generated tokens and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layertap.assembly import Rows
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.transformers.batching import BatchedStepper
from layertap.engines.transformers.bench import Bench
from layertap.engines.transformers.row_tap import Chunk, RowTap
from layertap.engines.transformers.single import SingleStepper
from layertap.engines.transformers.stepping import LiveSequence, Stepper

logger = logging.getLogger(__name__)

__all__ = ["Stepping", "Verdict", "find_way"]

Stepping = Literal["batched", "single", "recompute", "refused"]

_NUM_TOKENS = 8
_MANY_TOKENS = 20
_NEAR = 3
_LENGTHS = (4, 19, 45)
_CHUNK = 16
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
        causal: false where rows of long sequences depend on the tokens that come later (sparse attention that chooses among
            all of them): rows are then those of the run and can't be had again from the final tokens.
    """

    way: Stepping
    attention: str
    reason: str
    row_error: float
    causal: bool = True

    def __str__(self) -> str:
        return f"{self.way} ({self.attention}): {self.reason}"


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt, and how many tokens are generated after it."""

    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    row_error: float
    trouble: str | None


@dataclass(frozen=True, slots=True)
class _Moved:
    """How far rows of a few and of some dozen tokens move when tokens are appended.

    Attributes:
        near, far: 0 where that is rounding.
        rounding: how large rounding was, as `_row_error` has it.
    """

    near: float
    far: float
    rounding: float = 0.0

    def tolerance(self, dtype: torch.dtype) -> float:
        """How far rows may be off. Rounding adds up over the blocks, in deep random ones to more than in any trained model."""
        usual = _ROW_TOLERANCE[dtype]
        return usual if dtype == torch.float32 else min(max(usual, 2 * self.rounding), 2 * usual)


def find_way(bench: Bench, *, max_len: int) -> Verdict:
    """Try the ways in the order of their speed."""
    dtype = next(bench.model.parameters()).dtype
    cases = _cases(bench, max_len)
    with torch.inference_mode():
        try:
            bench, moved = _settle(bench, cases[-1].prompt, dtype)
        except Exception as error:  # noqa: BLE001 - it is the verdict
            return Verdict("refused", "eager", f"a plain forward failed: {_first_line(error)}", float("inf"))
        if moved.near:
            what = f"rows move by {moved.near:.1e} when tokens are appended: the model isn't causal"
            return Verdict("refused", "eager", what, float("inf"))
        return _first_that_agrees(bench, cases, moved, dtype)


def _first_that_agrees(bench: Bench, cases: list[_Case], moved: _Moved, dtype: torch.dtype) -> Verdict:
    troubles: list[str] = []
    batched: list[tuple[Stepping, str]] = [("batched", attention) for attention in bench.batched_attentions]
    single: list[tuple[Stepping, str]] = [("single", attention) for attention in bench.attentions]
    ways = [*batched, *single, ("recompute", "eager")]
    if moved.far:
        # What it attends to is chosen among all tokens, later ones too, once there are more than it can hold: then no plain
        # forward is a reference, and the rows are those of the run, as the model's own `generate` makes them.
        ways, cases = single, [_Case(cases[0].prompt[:_NEAR], _NEAR)]
        troubles.append(f"rows of long prompts move by {moved.far:.1e} when tokens are appended, so not batched")
    for way, attention in ways:
        outcome = _try(bench, way, attention, cases, dtype, moved.tolerance(dtype))
        if outcome.trouble is None:
            what = f"rows within {outcome.row_error:.1e} of plain forwards, same tokens"
            return Verdict(way, attention, "; ".join([*troubles, what]), outcome.row_error, not moved.far)
        troubles.append(f"not {way} ({attention}: {outcome.trouble})")
    return Verdict("refused", "eager", "; ".join(troubles), float("inf"))


def _settle(bench: Bench, prompt: list[int], dtype: torch.dtype) -> tuple[Bench, _Moved]:
    """Choose the bench, and see whether plain forwards on it can be the reference."""
    # What a model does to itself in its first forward (RWKV scales its weights) must be done before it is copied.
    device = next(bench.model.parameters()).device
    try:
        bench.model(input_ids=torch.tensor([prompt[:1]], device=device), use_cache=False)
    except Exception as error:  # noqa: BLE001 - its own attention may refuse what it asks for; the ways are tried below
        logger.info("the model as it was loaded: %s", _first_line(error))
    near = bench.with_near_thresholds()
    try:
        return near, _moved(near, prompt, dtype)
    except Exception as error:  # noqa: BLE001 - a model may not stand thresholds that its weights weren't made for
        logger.info("the trial runs with the model's own windows: %s", _first_line(error))
        return bench, _moved(bench, prompt, dtype)


def _moved(bench: Bench, prompt: list[int], dtype: torch.dtype) -> _Moved:
    model, found = bench.view("eager")
    tap = RowTap(model, found)
    try:
        distances = []
        rounding = 0.0
        for length in (2 * _NEAR, len(prompt)):
            rows, _ = _plain(bench, model, tap, prompt[:length])
            first, _ = _plain(bench, model, tap, prompt[: length // 2])
            distance = _row_error(first, rows[: len(first)], torch.float32)
            is_rounding = distance <= 10 * _ROW_TOLERANCE[dtype]
            distances.append(0.0 if is_rounding else distance)
            if is_rounding:
                rounding = max(rounding, _row_error(first, rows[: len(first)], dtype))
    finally:
        tap.close()
    near, far = distances
    return _Moved(near, far, rounding)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _row_error(given: NDArray[np.float32], expected: NDArray[np.float32], dtype: torch.dtype) -> float:
    """The largest relative error of a row; in half precision all but the worst 5 % (a router may flip)."""
    errors = np.linalg.norm(given - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), 1e-12)
    return float(errors.max() if dtype == torch.float32 else np.quantile(errors, 0.95))


def _cases(bench: Bench, max_len: int) -> list[_Case]:
    """Prompts that cross chunks and thresholds; the first goes on past several blocks of windowed or compressed attention."""
    lengths = sorted({max(1, min(length, max_len - _NUM_TOKENS)) for length in _LENGTHS})
    generator = torch.Generator().manual_seed(0)
    ordinary = bench.ordinary_ids
    prompts = [
        [ordinary[i] for i in torch.randint(len(ordinary), (length,), generator=generator).tolist()]
        for length in lengths
    ]
    first, *others = prompts
    return [_Case(first, max(1, min(_MANY_TOKENS, max_len - len(first)))), *(_Case(p, _NUM_TOKENS) for p in others)]


def _try(
    bench: Bench, way: Stepping, attention: str, cases: Sequence[_Case], dtype: torch.dtype, tolerance: float
) -> _Outcome:
    try:
        with _stepper(bench, way, attention, cases) as stepper:
            outputs, rows = _generate(bench, stepper, cases)
        # Without a cache the tokens are those of plain forwards already; a rotary switch between two of them may move what
        # the whole sequence would give for the earlier one.
        return _compare(bench, cases, outputs, rows, dtype, tolerance, tokens=way != "recompute")
    except Exception as error:  # noqa: BLE001 - any failure means: not this way
        return _Outcome(float("inf"), _first_line(error))


@contextmanager
def _stepper(bench: Bench, way: Stepping, attention: str, cases: Sequence[_Case]) -> Iterator[Stepper]:
    model, found = bench.view(attention)
    longest = max(len(case.prompt) + case.num_tokens for case in cases) + 1
    stepper: Stepper
    if way == "batched":
        room = sum(len(case.prompt) + case.num_tokens + 32 for case in cases) * 2
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
    bench: Bench, stepper: Stepper, cases: Sequence[_Case]
) -> tuple[dict[str, list[int]], dict[str, dict[int, NDArray[np.float32]]]]:
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(cases))}
    rows: dict[str, dict[int, NDArray[np.float32]]] = {key: {} for key in outputs}
    for key, case in zip(outputs, cases, strict=True):
        spec = _spec(bench, len(case.prompt), case.num_tokens)
        stepper.add(LiveSequence(key, list(case.prompt), len(case.prompt) + case.num_tokens + 1, spec))
    wanted = {key: case.num_tokens for key, case in zip(outputs, cases, strict=True)}
    running = set(outputs)

    def choose(keys: Sequence[str], logits: Tensor) -> list[int]:
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for key, token in zip(keys, tokens, strict=True):
            outputs[key].append(token)
        return tokens

    for _ in range(sum(len(case.prompt) + case.num_tokens for case in cases) + 100):
        step = stepper.step(choose)
        if step.failed:
            raise next(iter(step.failed.values()))
        for key, chunk in step.rows:
            _keep(rows[key], chunk)
        for key in [key for key in running if len(outputs[key]) >= wanted[key]]:
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
    cases: Sequence[_Case],
    outputs: dict[str, list[int]],
    rows: dict[str, dict[int, NDArray[np.float32]]],
    dtype: torch.dtype,
    tolerance: float,
    *,
    tokens: bool,
) -> _Outcome:
    model, found = bench.view("eager")
    tap = RowTap(model, found)
    worst = 0.0
    try:
        for (key, output), case in zip(outputs.items(), cases, strict=True):
            prompt = case.prompt
            expected, logits = _plain(bench, model, tap, [*prompt, *output[:-1]])
            if sorted(rows[key]) != list(range(len(expected))):
                return _Outcome(float("inf"), f"rows of a prompt of {len(prompt)} tokens are missing")
            given = np.stack([rows[key][position] for position in range(len(expected))])
            error = _row_error(given, expected, dtype)
            if not error <= tolerance:
                return _Outcome(error, f"rows of a prompt of {len(prompt)} tokens are off by {error:.1e}")
            worst = max(worst, error)
            gaps = _gaps(logits[len(prompt) - 1 :], output)
            if tokens and not float(gaps.max()) <= _LOGIT_TOLERANCE[dtype]:
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
    spec = _spec(bench, len(ids), 0)
    tap.expect([Chunk("", spec, spec.candidates, 0, len(ids), 0)])
    device = next(model.parameters()).device
    outputs = model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    ((_, chunk),) = tap.collect(1)
    logits: Tensor = outputs.logits[0].float()
    return chunk.data.view(np.float32), logits
