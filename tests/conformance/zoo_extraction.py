"""Run one model of the zoo through extraction and compare every row of every layer with the oracle.

python -m tests.conformance.zoo_extraction [NAME ...]   # the table of ways for docs/, as Markdown
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec
from layertap.engines.base import ExtractJob
from layertap.engines.transformers.engine import TransformersEngine
from layertap.engines.transformers.packing import Way
from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.trees import Tree
from layertap.errors import UnsupportedModelError
from layertap.testing import oracle, zoo
from layertap.writing.recorder import Recorder

LENGTHS = (6, 32, 17, 3, 28, 32)
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one model.

    Attributes:
        name: its case in the zoo.
        way: packed, padded, alone, or refused.
        reason: of the self-test, or of the refusal.
        error: largest relative row error against the oracle; None where refused.
    """

    name: str
    way: str
    reason: str
    error: float | None


def prompts(seed: int = 1) -> list[list[int]]:
    """Prompts of mixed lengths, longer than the zoo's windows and its shortest rotary tables."""
    generator = torch.Generator().manual_seed(seed)
    ids = zoo.TOKEN_IDS
    return [[int(i) for i in torch.randint(ids.start, ids.stop, (length,), generator=generator)] for length in LENGTHS]


def extract(engine: TransformersEngine, sequences: list[list[int]], layers: tuple[int, ...]) -> list[torch.Tensor]:
    """Rows [tokens, layers, hidden] of each sequence, by the engine and the recorder, in memory."""
    recorder = Recorder(StoreOptions(), model="zoo", num_layers=engine.info.num_layers, facts=engine.info.facts())
    try:
        captures = [
            recorder.admit(
                CaptureSpec(
                    layers=layers, dtype="float32", hidden_size=engine.info.hidden_size, prompt_len=len(sequence)
                ),
                request_id=f"zoo-{i}",
                path=None,
            )
            for i, sequence in enumerate(sequences)
        ]
        jobs = [ExtractJob(index=i, token_ids=s, capture=captures[i]) for i, s in enumerate(sequences)]
        done = sorted(engine.extract(jobs))
        assert done == list(range(len(sequences))), f"delivered {done}"
        results = [capture.result.result(timeout=60) for capture in captures]
    finally:
        recorder.close()
    rows = [result.rows for result in results]
    return [torch.from_numpy(r.view(np.float32).copy()) for r in rows if r is not None]


def by_other_ways(
    engine: TransformersEngine, sequences: list[list[int]], truth: list[torch.Tensor]
) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The rows by every way that the self-test allows, also those that extraction wouldn't choose, and their truth."""
    routes, weights = engine.routes(), engine.weights
    passes = Passes(weights.at_least(weights.num_layers), weights.layout, routes.attention)
    short = [i for i, s in enumerate(sequences) if routes.max_together is None or len(s) <= routes.max_together]
    groups: list[tuple[Way, list[int]]] = [("alone", [i]) for i in range(len(sequences))]
    groups += [("packed", short)] if routes.packed else []
    groups += [("padded", short)] if routes.padded else []
    for way, group in groups:
        lengths = [len(sequences[i]) for i in group]
        rows = torch.full((sum(lengths), weights.num_layers + 1, weights.layout.hidden_size), float("nan"))
        passes.run(way, [sequences[i] for i in group], [range(n) for n in lengths], range(weights.num_layers + 1), rows)
        yield list(rows.split(lengths)), [truth[i] for i in group]
    if routes.shared:
        yield shared_and_alone(passes, sequences)


def shared_and_alone(passes: Passes, sequences: list[list[int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The rows of sequences that begin alike, run with their beginning once, and each on its own."""
    trunk, other, third = sequences[1], sequences[5], sequences[4]
    family = sorted([trunk, trunk[:20] + other[:12], trunk[:26] + third[:6]])
    tree, layers = Tree.of(family), range(len(passes.layout.blocks_of(passes.model)) + 1)
    assert tree.num_rows < sum(map(len, family))
    hidden = passes.layout.hidden_size
    rows = torch.full((tree.num_rows, len(layers), hidden), float("nan"))
    passes.run("shared", family, tree.own, layers, rows)
    alone = [torch.full((len(one), len(layers), hidden), float("nan")) for one in family]
    for one, into in zip(family, alone, strict=True):
        passes.run("alone", [one], [range(len(one))], layers, into)
    return [torch.cat([rows[begin:end] for begin, end in spans]) for spans in tree.rows], alone


def worst_error(rows: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Largest relative error of a row in any sequence and layer; infinite if one isn't a number."""
    worst = 0.0
    for given, exact in zip(rows, truth, strict=True):
        assert given.shape == exact.shape, f"rows {tuple(given.shape)}, expected {tuple(exact.shape)}"
        worst = max(worst, float(row_errors(given, exact).nan_to_num(nan=float("inf")).max()))
    return worst


def row_errors(rows: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Relative error of each row in each layer."""
    exact = truth.double()
    return (rows.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)


def check(name: str, folder: Path) -> Outcome:
    """Extract all layers of one model of the zoo, mixed lengths at once, and compare with the oracle."""
    checkpoint = zoo.save(name, folder)
    try:
        engine = TransformersEngine(checkpoint)
        routes = engine.routes()
    except UnsupportedModelError as exc:
        return Outcome(name=name, way="refused", reason=str(exc).split("\n")[0], error=None)
    try:
        sequences = prompts()
        layers = tuple(range(engine.info.num_layers + 1))
        rows = extract(engine, sequences, layers)
        model = oracle_model(engine)
        truth = [oracle.hidden_states(copy.deepcopy(model), s) for s in sequences]  # a fresh copy: some keep a state
        worst = max(
            worst_error(rows, truth), *(worst_error(*other) for other in by_other_ways(engine, sequences, truth))
        )
        return Outcome(name=name, way=routes.way, reason=routes.reason, error=worst)
    finally:
        engine.close()


def oracle_model(engine: TransformersEngine) -> torch.nn.Module:
    """A model of its own for the oracle, straight from transformers, of the class that the engine chose."""
    source = engine.weights.source
    model: torch.nn.Module = source.model_class.from_pretrained(
        source.path, config=copy.deepcopy(source.config), dtype=torch.float32
    ).eval()
    return model


def table(outcomes: Iterable[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = ["| model | way | largest row error | what the self-test found |", "|---|---|---|---|"]
    for outcome in outcomes:
        error = "" if outcome.error is None else f"{outcome.error:.0e}"
        reason = outcome.reason.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {outcome.name} | {outcome.way} | {error} | {reason} |")
    return "\n".join(lines)


def main(names: list[str]) -> None:
    """Print the table for these models, or for all."""
    with tempfile.TemporaryDirectory() as folder:
        print(table(check(name, Path(folder)) for name in names or zoo.CASES))


if __name__ == "__main__":
    main(sys.argv[1:])
