"""What an engine is to everybody else: the model's facts, the jobs it takes, and the protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from layertap.params import SamplingParams
from layertap.writing.recorder import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts of a loaded model that others need.

    Attributes:
        model: name or path, as it was given.
        revision: of the hub, or None.
        num_layers: blocks of the (text) decoder.
        hidden_size: width of the residual stream.
        vocab_size: ids are 0 .. vocab_size - 1.
        max_model_len: the most tokens of a sequence, prompt and output.
        dtype: compute dtype ("float32", "bfloat16", "float16").
        device: "cpu", "cuda:0", ...
        engine: "transformers" or "vllm".
        engine_version: version of that package.
        quantization: method, or None.
        residual: a note on what the stream is, where a model has several.
        eos_token_ids: ids that end a generation.
        generation_defaults: sampling defaults of the model's generation config (temperature, top_p, top_k, ...).
    """

    model: str
    revision: str | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    engine: str
    engine_version: str
    quantization: str | None = None
    residual: str = "single stream"
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """What every file of this model says in its metadata."""
        return {
            "engine": self.engine,
            "engine_version": self.engine_version,
            "compute_dtype": self.dtype,
            "revision": self.revision or "",
            "quantization": self.quantization or "",
            "residual": self.residual,
        }


TokenIds = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractJob:
    """Prefill one prompt; rows go to the capture, which is finished with the reason "prefill"."""

    index: int
    token_ids: TokenIds
    capture: Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """Log probabilities at one position: the sampled token's and the top n, as token id -> (logprob, rank from 1)."""

    token_id: int
    entries: dict[int, tuple[float, int]]


@dataclass(slots=True, kw_only=True)  # not frozen: a step makes hundreds
class Delta:
    """What one step added to one sequence.

    Attributes:
        token_ids: new tokens (their text may still be held back while a stop string is possible).
        text: new text.
        logprobs: one entry per new token, or None if not asked for.
        prompt_logprobs: with the first delta, if asked for; entry 0 is None.
        finish_reason: "stop", "length", "abort" or "error" with the last delta.
        stop_reason: the stop string or token id that ended it.
        error: the reason, with finish_reason "error".
        trimmed_text_len: characters at the end of the text so far that a stop string takes back; 0 where text was held back.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TopLogprobs] | None = None
    prompt_logprobs: Sequence[TopLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """Generate one sequence.

    Attributes:
        request_id: unique among running jobs.
        prompt_ids: the prompt.
        params: with n = 1; seeds of several choices are already told apart.
        max_tokens: resolved: never None, within the model's length.
        capture: where rows go, or None.
        on_delta: called on the engine's thread, in order; must not block or raise.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    capture: Capture | None
    on_delta: Callable[[Delta], None]


class SpotCounts(Protocol):
    """What came of spot checks."""

    @property
    def checked(self) -> int:
        """Sequences that were computed twice."""

    @property
    def failed(self) -> int:
        """How many of them differed; they were not delivered."""

    @property
    def worst(self) -> float:
        """The largest median error of a layer so far."""


class Engine(Protocol):
    """An embedded engine. All methods are thread-safe."""

    @property
    def spot_checks(self) -> Mapping[str, SpotCounts]:
        """By kind of work, "extract" and "generate"."""

    @property
    def info(self) -> ModelInfo:
        """The facts of the model."""

    @property
    def tokenizer(self) -> Any:
        """Of transformers, or None."""

    def extract(self, jobs: Iterable[ExtractJob], *, share_prefixes: bool = False) -> Iterable[int]:
        """Run prompts as `jobs` are pulled; yields the index of each job whose rows have all been handed over (or failed).

        With `share_prefixes`, what jobs that follow one another have in common at their beginning may be computed once.
        """

    def check(self, params: SamplingParams) -> None:
        """Raise an OptionError for what this engine can't honour."""

    def submit(self, job: GenerateJob) -> None:
        """Queue a generation. Failures come as a Delta with finish_reason "error"."""

    def abort(self, request_id: str) -> None:
        """End a generation now; its last Delta says "abort". Unknown ids are ignored."""

    def close(self) -> None:
        """End everything; running generations end with an error."""
