"""A client of the generation loop: asks, waits, and compares with plain forwards of the same model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.base import Delta, GenerateJob, ModelInfo
from layertap.params import SamplingParams
from layertap.testing import oracle
from layertap.writing.recorder import Capture, Recorder

TIMEOUT = 120
EVERYTHING = Window(include_output=True)


def info_for(model: Any, **changes: Any) -> ModelInfo:
    """The facts of a tiny model of the zoo."""
    text = model.config.get_text_config(decoder=True)
    facts: dict[str, Any] = {
        "model": "tiny",
        "revision": None,
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_model_len": 256,
        "dtype": "float32",
        "device": "cpu",
        "engine": "transformers",
        "engine_version": "0",
    }
    return ModelInfo(**{**facts, **changes})


class Answer:
    """What came back for one request."""

    def __init__(self, prompt: list[int], capture: Capture | None, listener: Callable[[Delta], None] | None) -> None:
        self.prompt = prompt
        self.capture = capture
        self.deltas: list[Delta] = []
        self.ended = threading.Event()
        self._listener = listener

    def listen(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.ended.set()
        if self._listener is not None:
            self._listener(delta)

    def wait(self) -> Answer:
        assert self.ended.wait(TIMEOUT), "the request didn't end"
        return self

    @property
    def last(self) -> Delta:
        return self.wait().deltas[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.wait().deltas for token_id in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.wait().deltas)

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt, *self.token_ids]

    @property
    def facts(self) -> dict[str, str]:
        """The metadata of the result."""
        assert self.capture is not None
        return dict(self.capture.result.result(TIMEOUT).info.facts)

    @property
    def rows(self) -> torch.Tensor:
        assert self.capture is not None
        rows = self.capture.result.result(TIMEOUT).rows
        assert rows is not None
        return torch.from_numpy(rows.view(np.float32).copy())


class Client:
    """Asks a generator (or an engine) and captures rows in memory."""

    def __init__(self, generator: Any, info: ModelInfo) -> None:
        self.generator = generator
        self.info = info
        self.recorder = Recorder(StoreOptions(), model="tiny", num_layers=info.num_layers, facts=info.facts())
        self._ids = itertools.count()

    def ask(
        self,
        prompt: Sequence[int],
        *,
        layers: Sequence[int] | None = None,
        window: Window | None = EVERYTHING,
        request_id: str | None = None,
        listener: Callable[[Delta], None] | None = None,
        **params: Any,
    ) -> Answer:
        """Submit a request, greedy unless said otherwise."""
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
        assert sampling.max_tokens is not None
        name = request_id or f"request-{next(self._ids)}"
        max_tokens = max(1, min(sampling.max_tokens, self.info.max_model_len - len(prompt)))
        capture = None
        if window is not None:
            spec = CaptureSpec(
                layers=tuple(range(self.info.num_layers + 1) if layers is None else layers),
                dtype="float32",
                hidden_size=self.info.hidden_size,
                prompt_len=len(prompt),
                max_tokens=max_tokens,
                window=window,
            )
            capture = self.recorder.admit(spec, request_id=name, path=None)
        answer = Answer(list(prompt), capture, listener)
        self.generator.submit(
            GenerateJob(
                request_id=name,
                prompt_ids=list(prompt),
                params=sampling,
                max_tokens=max_tokens,
                capture=capture,
                on_delta=answer.listen,
            )
        )
        return answer

    def close(self) -> None:
        self.recorder.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Ordinary tokens of the zoo's tokenizer."""
    found: list[int] = torch.randint(8, 264, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def greedy(model: Any, prompt: Sequence[int], number: int) -> list[int]:
    """Greedy tokens by plain forwards of the whole sequence."""
    ids = list(prompt)
    with torch.no_grad(), oracle.with_attention(model, "eager"):
        for _ in range(number):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def row_error(answer: Answer, model: Any, positions: slice = slice(None)) -> float:
    """The largest relative error of a row against the oracle, over all layers."""
    truth = oracle.hidden_states(model, answer.all_ids[:-1])[positions]
    assert answer.rows.shape == truth.shape
    errors = (answer.rows - truth).norm(dim=-1) / truth.norm(dim=-1)
    return float(errors.nan_to_num(nan=float("inf")).max())
