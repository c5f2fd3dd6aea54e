"""Generate with one model of the zoo and compare tokens with `model.generate` and rows with the oracle.

python -m tests.conformance.zoo_generation [NAME ...]   # the table of ways for docs/, as Markdown
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layertap.capture.blocks import find_blocks
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.base import Delta, GenerateJob, ModelInfo
from layertap.engines.transformers.generate import Generator
from layertap.errors import LayertapError, UnsupportedModelError
from layertap.params import SamplingParams
from layertap.testing import oracle, zoo
from layertap.writing.recorder import Recorder

LENGTHS = (40, 3, 17, 28)
NUM_TOKENS = 8
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one model.

    Attributes:
        name: its case in the zoo.
        way: batched, single, recompute, or refused.
        reason: of the trial, or of the refusal.
        error: largest relative row error against the oracle; None where refused.
        same_tokens: greedy tokens are those of `model.generate`; None where that can't run.
        note: why `model.generate` can't run, or differs.
    """

    name: str
    way: str
    reason: str
    error: float | None = None
    same_tokens: bool | None = None
    note: str = ""


def build(name: str) -> Any:
    """The model as it would be loaded: with torch's attention where it has that."""
    try:
        return zoo.build(name, attn_implementation="sdpa")
    except ValueError:
        return zoo.build(name)


def info_of(model: Any, name: str) -> ModelInfo:
    """The facts of a model of the zoo."""
    found = find_blocks(model)
    text = model.config.get_text_config(decoder=True)
    hidden_size = found.hidden_size or model.get_input_embeddings().weight.shape[1]
    return ModelInfo(
        model=name,
        revision=None,
        num_layers=found.num_layers,
        hidden_size=hidden_size,
        vocab_size=min(text.vocab_size, zoo.TOKEN_IDS.stop),
        max_model_len=int(getattr(text, "max_position_embeddings", None) or 256),
        dtype="float32",
        device="cpu",
        engine="transformers",
        engine_version="0",
    )


def prompts(longest: int, seed: int = 1) -> list[list[int]]:
    """Prompts of mixed lengths, longer than the zoo's windows."""
    generator = torch.Generator().manual_seed(seed)
    ids = zoo.TOKEN_IDS
    return [
        torch.randint(ids.start, ids.stop, (min(length, longest),), generator=generator).tolist() for length in LENGTHS
    ]


@dataclass(slots=True)
class Generated:
    """The tokens and rows of one request."""

    token_ids: list[int]
    rows: torch.Tensor
    finish_reason: str


def generate(
    generator: Generator, info: ModelInfo, sequences: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Generated]:
    """Run requests together, all layers captured; the rows come through the recorder."""
    recorder = Recorder(StoreOptions(), model=info.model, num_layers=info.num_layers, facts=info.facts())
    ended: queue.Queue[int] = queue.Queue()
    tokens: list[list[int]] = [[] for _ in sequences]
    last: list[Delta] = [Delta() for _ in sequences]
    captures = []

    def listen(i: int, delta: Delta) -> None:
        tokens[i] += delta.token_ids
        if delta.finish_reason is not None:
            last[i] = delta
            ended.put(i)

    try:
        for i, (prompt, wanted) in enumerate(zip(sequences, params, strict=True)):
            assert wanted.max_tokens is not None
            spec = CaptureSpec(
                layers=tuple(range(info.num_layers + 1)),
                dtype="float32",
                hidden_size=info.hidden_size,
                prompt_len=len(prompt),
                max_tokens=wanted.max_tokens,
                window=Window(include_output=True),
            )
            captures.append(recorder.admit(spec, request_id=f"zoo-{i}", path=None))
            generator.submit(
                GenerateJob(
                    request_id=f"zoo-{i}",
                    prompt_ids=prompt,
                    params=wanted,
                    max_tokens=wanted.max_tokens,
                    capture=captures[-1],
                    on_delta=lambda delta, i=i: listen(i, delta),
                )
            )
        for _ in sequences:
            ended.get(timeout=120)
        for delta in last:
            if delta.error is not None:
                raise delta.error
        results = [capture.result.result(timeout=60) for capture in captures]
    finally:
        recorder.close()
    return [
        Generated(ids, torch.from_numpy(result.rows.view(np.float32).copy()), delta.finish_reason or "")
        for ids, result, delta in zip(tokens, results, last, strict=True)
        if result.rows is not None
    ]


def check(name: str) -> Outcome:
    """Greedy beside sampled, short beside long; every row of every layer against the oracle."""
    model = build(name)
    if model.config.is_encoder_decoder:
        return Outcome(name=name, way="refused", reason="encoder-decoder: generation needs the encoder's input")
    try:
        info = info_of(model, name)
        generator = Generator(model, None, info)
    except UnsupportedModelError as error:
        return Outcome(name=name, way="refused", reason=str(error).split("\n")[0])
    try:
        verdict = generator.verdict
        if verdict.way == "refused":
            return Outcome(name=name, way="refused", reason=verdict.reason)
        sequences = prompts(info.max_model_len - NUM_TOKENS)
        params = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS) for _ in sequences]
        params[2] = SamplingParams(temperature=1.0, seed=5, top_k=20, max_tokens=NUM_TOKENS)
        try:
            results = generate(generator, info, sequences, params)
        except LayertapError as error:
            return Outcome(name=name, way=verdict.way, reason=f"{verdict.reason}; then {error}", error=float("inf"))
    finally:
        generator.close()
    worst, same, note = 0.0, True, ""
    reference, attention = build(name), zoo.case(name).attention
    for sequence, wanted, result in zip(sequences, params, results, strict=True):
        compared = [*sequence, *result.token_ids[:-1]]
        if (
            not verdict.causal
        ):  # what came later changed what a plain forward gives: only the prompt's own can be compared
            compared = sequence
            result.rows = result.rows[: len(sequence)]
        truth = oracle.hidden_states(reference, compared, attention=attention)
        assert result.rows.shape == truth.shape, f"{name}: rows {tuple(result.rows.shape)}, not {tuple(truth.shape)}"
        errors = (result.rows - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-30)
        worst = max(worst, float(errors.nan_to_num(nan=float("inf")).max()))
        if wanted.greedy:
            plain, problem = plain_tokens(reference, sequence, attention)
            note = note or problem
            same = same and plain == result.token_ids
    return Outcome(
        name=name,
        way=verdict.way,
        reason=verdict.reason,
        error=worst,
        same_tokens=None if note else same,
        note=note,
    )


def plain_tokens(model: Any, prompt: Sequence[int], attention: str) -> tuple[list[int], str]:
    """What transformers' own greedy `generate` gives, or why it can't."""
    ids = torch.tensor([list(prompt)])
    try:
        with torch.no_grad(), oracle.with_attention(model, attention):
            output = model.generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, num_beams=1
            )
    except Exception as error:  # noqa: BLE001 - the message goes into the table
        return [], f"model.generate: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    found: list[int] = output[0, len(prompt) :].tolist()
    return found, ""


HEAD = "| model | way | largest row error | tokens as `generate` | what the trial found |\n|---|---|---|---|---|"


def line(outcome: Outcome) -> str:
    """One line of the table."""
    error = "" if outcome.error is None else f"{outcome.error:.0e}"
    same = {True: "yes", False: "NO", None: outcome.note}[outcome.same_tokens]
    cells = (outcome.name, outcome.way, error, same, outcome.reason)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(outcomes: Iterable[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    return "\n".join([HEAD, *(line(outcome) for outcome in outcomes)])


def main(names: list[str]) -> None:
    """Print the table for these models, or for all, line by line."""
    print(HEAD)
    for name in names or zoo.CASES:
        try:
            outcome = check(name)
        except Exception as error:  # noqa: BLE001 - the table lists it
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            outcome = Outcome(name=name, way="FAILED", reason=reason)
        print(line(outcome), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
