"""Kill `extract` jobs at random moments: what is in the data set is right, and the next run finishes it."""

import contextlib
import json
import random
import sys
from pathlib import Path

import torch
from victims import LAYERS, Figures, Victim, WarmModel, prompts, scratch

from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions
from layertap.errors import HiddenStatesError, MissingError
from layertap.llm import LLM

_NUM_PROMPTS = 24
_MOST_KILLS = 12


def job(model: WarmModel, source: Path, folder: Path, layout: str) -> None:
    """One run, as `layertap extract` does it."""
    torch.set_num_threads(1)
    llm = LLM.__new__(LLM)
    llm._front = model.front(folder.parent / "unused")
    shards = ShardOptions(shard_bytes=20_000, fsync=False)
    extract_dataset(llm, open_input(source), folder, RunOptions(layers=LAYERS, layout=layout, shards=shards))


def run(rounds: int, seed: int) -> Figures:
    """Jobs are killed until one comes to its end, or twelve times; then one runs in peace. `rounds` kills in all."""
    rng = random.Random(seed)
    figures = Figures()
    with scratch("kill-job") as root:
        model = WarmModel(root)
        number = 0
        while figures.rounds < rounds:
            number += 1
            source, folder = root / f"{number}.jsonl", root / f"states-{number}"
            made = prompts(rng, _NUM_PROMPTS)
            source.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in made))
            layout = rng.choice(["shards", "files"])
            kept = 0
            for _ in range(_MOST_KILLS):
                if figures.rounds == rounds:
                    break
                victim = Victim(job, model, source, folder, layout)
                victim.kill_after(rng.uniform(0.0, 0.25))
                victim.join()
                if victim.process.exitcode == 0:
                    break
                figures.rounds += 1
                now = _look(model, folder, figures)
                figures.wrong += now < kept  # what was there must not go away
                kept = now
            victim = Victim(job, model, source, folder, layout)
            victim.join()
            _look(model, folder, figures)
            figures.wrong += _count(folder) != _NUM_PROMPTS
            figures.left_behind += len(list(folder.glob("**/.*layertap-tmp")))
    return figures


def _look(model: WarmModel, folder: Path, figures: Figures) -> int:
    with contextlib.suppress(MissingError):
        try:
            found = open_dataset(folder, verify=True)
        except HiddenStatesError as exc:
            print(f"refused after a kill: {exc}", file=sys.stderr)
            figures.count("told")
            return 0
        for item in found:
            figures.count("complete" if model.right(item["hidden_states"], item["token_ids"]) else "wrong")
        return len(found)
    return 0


def _count(folder: Path) -> int:
    return len(open_dataset(folder))
