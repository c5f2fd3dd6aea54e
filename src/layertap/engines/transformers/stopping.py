"""When a sequence ends, and how that is told: vLLM's `finish_reason` and `stop_reason`."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finish", "FinishReason", "StopRules"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended.

    Attributes:
        reason: "stop", "length", "abort" or "error".
        stop_reason: the stop token's id or the stop string; None for the model's own end of sequence.
        ended_by_token: the last token is an end-of-sequence or stop token, whose text isn't part of the output.
        error: what went wrong, for "error".
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    ended_by_token: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends one sequence.

    Attributes:
        eos_id: the end-of-sequence token; None with `ignore_eos`.
        stop_ids: other tokens that end it: `stop_token_ids`, and the generation config's further ones.
        max_tokens: generated tokens at most.
        max_len: tokens at most, the prompt's and the generated ones'.
    """

    eos_id: int | None
    stop_ids: Collection[int]
    max_tokens: int
    max_len: int

    def check(self, token_id: int, num_generated: int, prompt_len: int) -> Finish | None:
        """Whether the sequence ends with `token_id`, which is its `num_generated`-th token."""
        if token_id == self.eos_id:
            return Finish("stop", ended_by_token=True)
        if token_id in self.stop_ids:
            return Finish("stop", token_id, ended_by_token=True)
        if num_generated >= self.max_tokens or prompt_len + num_generated >= self.max_len:
            return Finish("length")
        return None
