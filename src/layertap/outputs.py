"""What comes back, in the shape of vLLM's outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layertap.files.read import read_file
from layertap.files.values import to_tensors
from layertap.writing.sinks import Result

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of a position's log probabilities.

    Attributes:
        logprob: natural log of the probability.
        rank: 1 is the most likely token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(kw_only=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: the choice, 0 .. n - 1.
        text: what was generated.
        token_ids: its tokens, an end-of-sequence token included.
        cumulative_logprob: sum over the tokens, where logprobs were asked for.
        logprobs: per token: token id -> Logprob.
        finish_reason: "stop", "length" or "abort"; None while it runs.
        stop_reason: the stop string or stop token id; None for the end-of-sequence token.
        kv_transfer_params: `hidden_states_path` and `hidden_states_id` of this choice, or None without capture.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def finished(self) -> bool:
        """True once there is a finish reason."""
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """One prompt with its sequences.

    Attributes:
        request_id: given or made.
        prompt: the text, where it was text.
        prompt_token_ids: its tokens.
        prompt_logprobs: per prompt token (the first is None), where asked for.
        outputs: one per choice.
        finished: all choices are done.
        kv_transfer_params: choice 0's handle: `hidden_states_path` and `hidden_states_id`.
        num_cached_tokens: prompt tokens that weren't computed anew.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: None = None
    lora_request: None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def snapshot(self) -> "RequestOutput":
        """As it is now; while it runs, the original grows."""
        choices = [
            replace(
                choice,
                token_ids=list(choice.token_ids),
                logprobs=None if choice.logprobs is None else list(choice.logprobs),
            )
            for choice in self.outputs
        ]
        return replace(self, outputs=choices)


class Extracted:
    """The hidden states of one prompt of `extract`.

    Attributes:
        index: the prompt's place in the input.
        layers: layer ids, in the order of `hidden_states`.
        path: the file, where a storage was given.
    """

    def __init__(self, index: int, result: Result) -> None:
        self.index = index
        self.layers = result.info.layers
        self.path: Path | None = result.path
        self._result = result

    @property
    def token_ids(self) -> "torch.Tensor":
        """int64 [tokens], one to one with the rows."""
        import torch

        return torch.from_numpy(self._result.token_ids)

    @property
    def hidden_states(self) -> "torch.Tensor":
        """[tokens, layers, hidden] on the CPU, as they are saved; read from the file where a storage was given."""
        return self._values["hidden_states"]

    @property
    def hidden_states_scale(self) -> "torch.Tensor | None":
        """[tokens, layers] float32 with fp8 rows, whose values stand for themselves times this; otherwise None."""
        return self._values.get("hidden_states_scale")

    @property
    def _values(self) -> "dict[str, torch.Tensor]":
        result = self._result
        rows = read_file(str(result.path)).rows if result.rows is None else result.rows
        return to_tensors(rows, result.info.dtype)

    @property
    def result(self) -> Result:
        """The raw rows and what the file says of itself."""
        return self._result

    def __repr__(self) -> str:
        info = self._result.info
        where = f", path={str(self.path)!r}" if self.path else ""
        return f"Extracted(index={self.index}, tokens={info.num_rows}, layers={list(self.layers)}, dtype={info.dtype}{where})"
