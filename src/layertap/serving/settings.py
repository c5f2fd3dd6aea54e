"""What a server is set up to do, beyond the store's options."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from layertap.errors import OptionError

logger = logging.getLogger(__name__)

KEY_ENV, VLLM_KEY_ENV = "LAYERTAP_API_KEY", "VLLM_API_KEY"


def api_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The keys of a command line, else the environment's; vLLM's variable counts, too, since whoever set it relies on it."""
    if given:
        return tuple(given)
    for name in (KEY_ENV, VLLM_KEY_ENV):
        if key := os.environ.get(name):
            logger.info("the API key is that of %s", name)
            return (key,)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side.

    Attributes:
        served_model_names: names that requests may use; the first is said in answers; default the model's own.
        api_keys: who may come in; none: everybody (on loopback).
        allow_delete: `DELETE /v1/hidden_states/{id}` is answered.
        allow_weight_updates: `POST /v1/weights` may load checkpoints from inside these folders.
        max_body_bytes: larger requests are refused.
        max_logprobs: the most log probabilities per token.
        max_running: sequences that may run or wait at once; more get a 429.
        reap_seconds: between two rounds of the reaper.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allow_delete: bool = False
    allow_weight_updates: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_logprobs: int = 20
    max_running: int = 4096
    reap_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_logprobs", "max_running"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if any(not key.strip() for key in self.api_keys):
            raise OptionError("api_key: expected a key that isn't empty")
        if not self.reap_seconds > 0:
            raise OptionError(f"reap_seconds: expected a positive number, got {self.reap_seconds!r}")
