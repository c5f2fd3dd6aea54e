"""What the tests of extraction share: engines over zoo checkpoints, jobs with real captures in memory, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.base import ExtractJob
from layertap.engines.transformers.engine import TransformersEngine
from layertap.testing import zoo
from layertap.writing.recorder import Capture, Recorder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.uint8}


def engine(name: str, folder: Path, **options: object) -> TransformersEngine:
    """An engine over a zoo checkpoint."""
    return TransformersEngine(zoo.save(name, folder), **options)


def recorder_of(of: TransformersEngine) -> Recorder:
    """A recorder for this engine's model."""
    return Recorder(StoreOptions(), model="zoo", num_layers=of.info.num_layers, facts=of.info.facts())


def capture_of(
    recorder: Recorder, hidden: int, prompt: Sequence[int], layers: Sequence[int], dtype: str, window: Window, name: str
) -> Capture:
    """A capture in memory."""
    spec = CaptureSpec(
        layers=tuple(layers), dtype=dtype, hidden_size=hidden, prompt_len=max(len(prompt), 1), window=window
    )
    return recorder.admit(spec, request_id=name, path=None)


def extract(
    of: TransformersEngine,
    prompts: Sequence[Sequence[int]],
    layers: Sequence[int],
    *,
    dtype: str = "float32",
    window: Window | None = None,
) -> list[torch.Tensor | BaseException]:
    """Rows [rows, layers, hidden] of each prompt, or why there are none."""
    with closing(recorder_of(of)) as recorder:
        hidden = of.info.hidden_size
        captures = [
            capture_of(recorder, hidden, prompt, layers, dtype, window or Window(), f"r{i}")
            for i, prompt in enumerate(prompts)
        ]
        jobs = (ExtractJob(index=i, token_ids=list(p), capture=captures[i]) for i, p in enumerate(prompts))
        done = list(of.extract(jobs))
        assert sorted(done) == list(range(len(prompts)))
        outcomes: list[torch.Tensor | BaseException] = []
        for capture in captures:
            error = capture.result.exception(timeout=60)
            rows = None if error else capture.result.result().rows
            outcomes.append(error if rows is None else torch.from_numpy(rows.copy()).view(DTYPES[dtype]))
    return outcomes


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of ordinary zoo tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = zoo.TOKEN_IDS
    return [torch.randint(ids.start, ids.stop, (length,), generator=generator).tolist() for length in lengths]
