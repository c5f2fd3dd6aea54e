"""From a request's body to SamplingParams: OpenAI's names, vLLM's defaults."""

from typing import Any

from layertap.engines.base import ModelInfo
from layertap.params import SamplingParams
from layertap.serving.api_errors import ApiError
from layertap.serving.schemas import ChatBody, CompletionBody

SAME_NAME = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)


def completion_params(body: CompletionBody, info: ModelInfo, max_logprobs: int) -> SamplingParams:
    """The sampling parameters of a completion.

    Raises:
        ApiError: a field that can't be honoured.
        OptionError: a bad value.
    """
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, f"best_of: can't be honoured, only n ({body.n or 1}) sequences are made", param="best_of")
    if body.suffix:
        raise ApiError(400, "suffix: can't be honoured; leave it out", param="suffix")
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400, "echo: log probabilities of the prompt can't be had; leave out echo or logprobs", param="echo"
        )
    _check_logprobs("logprobs", body.logprobs, max_logprobs)
    return _params(body, info, body.max_tokens, body.logprobs)


def chat_params(body: ChatBody, info: ModelInfo, max_logprobs: int) -> SamplingParams:
    """The sampling parameters of a chat; its default for max_tokens is the room that the model has.

    Raises:
        ApiError: a field that can't be honoured.
        OptionError: a bad value.
    """
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400,
            f"response_format: {body.response_format.type!r} can't be honoured by this engine, only 'text'; a server started with "
            "--engine vllm can",
            param="response_format",
        )
    if body.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            400,
            f"tool_choice: {body.tool_choice!r} can't be honoured by this engine, only 'auto' (a call is in the answer's text, "
            "as the model writes it) and 'none'; a server started with --engine vllm can",
            param="tool_choice",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
    _check_logprobs("top_logprobs", body.top_logprobs, max_logprobs)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _params(body, info, most, (body.top_logprobs or 0) if body.logprobs else None)


def _check_logprobs(name: str, asked: int | None, most: int) -> None:
    if asked is not None and asked > most:
        raise ApiError(400, f"{name}: at most {most} (max_logprobs), got {asked}", param=name, code="invalid_value")


def _params(
    body: CompletionBody | ChatBody, info: ModelInfo, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: only with stream=true", param="stream_options", code="invalid_value")
    given: dict[str, Any] = dict(info.generation_defaults)
    given.update({name: value for name in SAME_NAME if (value := getattr(body, name)) is not None})
    given["max_tokens"] = max_tokens
    if logprobs is not None:
        given["logprobs"] = logprobs
    if body.kv_transfer_params is not None:
        given["extra_args"] = {"kv_transfer_params": body.kv_transfer_params}
    return SamplingParams(**given)
