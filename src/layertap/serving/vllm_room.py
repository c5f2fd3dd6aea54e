"""How much a request to vLLM may write at most, before vLLM has seen it: for the answer 507 before anything is generated.

The middleware has no tokens yet. A text has at most as many as it has bytes, so what is set aside is an upper bound; it is
corrected once the answer is there.
"""

import json
from collections.abc import Mapping
from typing import Any

from layertap.capture.layers import LayersLike, resolve_layers
from layertap.capture.request import RequestOptions, slot_bytes
from layertap.engines.vllm.configured import Configured, configured
from layertap.errors import LayerError

_DEFAULT_MAX_TOKENS = 16
_TEMPLATE_TOKENS = 512
_TOKEN_BYTES = 8
_HEADER_BYTES = 4096


class RequestSizes:
    """Sizes for one model.

    Args:
        vllm_config: of the running server.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._configured = configured(vllm_config)
        self._max_len = int(vllm_config.model_config.max_model_len)

    def most_bytes(self, body: Mapping[str, Any], options: RequestOptions, num_prompts: int, num_choices: int) -> int:
        """The most that a request's captures may write."""
        if self._configured is None:
            return 0
        dtype = options.save_dtype or self._configured.dtype
        num_layers = (
            len(self._configured.layers) if options.layers is None else _count(options.layers, self._configured)
        )
        row_bytes = num_layers * slot_bytes(dtype, self._configured.hidden_size) + _TOKEN_BYTES
        rows = [self._rows(most, body, options) for most in self._prompt_tokens(body, num_prompts)]
        return num_choices * sum(count * row_bytes + _HEADER_BYTES for count in rows)

    def _rows(self, prompt_tokens: int, body: Mapping[str, Any], options: RequestOptions) -> int:
        window = options.window
        if window.positions == "last":
            return 1
        if isinstance(window.positions, tuple):
            return min(window.positions[1] - window.positions[0], self._max_len)
        generated = self._generated(body)
        rows = (
            generated if window.positions == "output" else prompt_tokens + (generated if window.include_output else 0)
        )
        return min(rows, self._max_len)

    def _generated(self, body: Mapping[str, Any]) -> int:
        given = body.get("max_completion_tokens")
        given = body.get("max_tokens") if given is None else given
        if isinstance(given, int):
            return max(0, min(given, self._max_len))
        return self._max_len if "messages" in body else _DEFAULT_MAX_TOKENS

    def _prompt_tokens(self, body: Mapping[str, Any], num_prompts: int) -> list[int]:
        if "messages" in body:
            parts = [body.get(name) for name in ("messages", "tools", "chat_template_kwargs")]
            size = len(json.dumps(parts, ensure_ascii=False).encode(errors="replace"))
            return [min(self._max_len, size + _TEMPLATE_TOKENS)]
        prompt = body.get("prompt")
        prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        most = [min(self._max_len, _tokens_of(one)) for one in prompts]
        return most if len(most) == num_prompts else [self._max_len] * num_prompts


def _tokens_of(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) + 2
    return len(prompt) if isinstance(prompt, list) else 0


def _count(layers: LayersLike, found: Configured) -> int:
    """How many layers a request names; a bad name is its own error, elsewhere."""
    try:
        return len(resolve_layers(layers, found.num_layers))
    except LayerError:
        return len(found.layers)
