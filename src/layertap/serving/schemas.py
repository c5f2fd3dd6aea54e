"""The bodies of requests: OpenAI's fields, vLLM's extras, and `kv_transfer_params`.

Types are strict (`"16"` is no number) and unknown fields are refused, since a field that is silently ignored is a wrong answer.
Fields that have no effect on what is generated (`user`, `metadata`, ...) are taken and ignored.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 128
MAX_PROMPTS = 512
MAX_STOPS = 64
MAX_TAGS = 128

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format`: only text can be had."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


class _Sampling(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # no effect on what is generated
    user: str | None = None
    # vLLM's
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    request_id: Annotated[str, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    # ours: the capture's options, as documented by vLLM
    kv_transfer_params: dict[str, Any] | None = Field(
        default=None,
        description="Options of the capture: hidden_states_path, include_output_tokens, layers, positions, save_dtype, "
        "overwrite, tag, capture.",
    )


class CompletionBody(_Sampling):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = 16
    suffix: str | None = None


class ChatBody(_Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # vLLM's
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    # no effect on what is generated
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
