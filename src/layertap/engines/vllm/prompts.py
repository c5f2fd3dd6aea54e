"""Prompts that only vLLM can read: images and other media, in its own form. Plain text and ids are read by layertap itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layertap.engines.base import ModelInfo
from layertap.prompts import Prompt, PromptReader

_MEDIA_KEYS = frozenset({"multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPrompt(Prompt):
    """A prompt whose tokens vLLM makes: the placeholders of its media are expanded there.

    Attributes:
        given: as vLLM takes it.
    """

    given: Any = None


class VllmPromptReader(PromptReader):
    """A PromptReader that lets prompts with media through.

    Args:
        info: the model's limits.
        tokenizer: of transformers, or None.
        llm: vLLM's `LLM`.
    """

    def __init__(self, info: ModelInfo, tokenizer: Any, llm: Any) -> None:
        super().__init__(info, tokenizer)
        self._llm = llm

    def read(self, prompt: Any, *, room: int = 0) -> Prompt:
        """As PromptReader.read; `{"prompt": text, "multi_modal_data": {...}}` is left to vLLM."""
        if isinstance(prompt, MediaPrompt):
            return prompt
        if isinstance(prompt, Mapping) and not _MEDIA_KEYS.isdisjoint(prompt):
            text = prompt.get("prompt")
            return MediaPrompt(token_ids=[], text=text if isinstance(text, str) else None, given=dict(prompt))
        return super().read(prompt, room=room)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """As PromptReader.chat; conversations with other parts than text are rendered by vLLM."""
        if all(_is_text(message) for message in messages):
            return super().chat(messages, **options)
        options.pop("room", None)
        (given,) = self._llm._preprocess_chat([list(messages)], **options)
        text = given.get("prompt")
        return MediaPrompt(token_ids=[], text=text if isinstance(text, str) else None, given=given)


def as_vllm_takes_it(prompt: Prompt) -> Any:
    """What vLLM's `generate` and `add_request` are given."""
    return prompt.given if isinstance(prompt, MediaPrompt) else {"prompt_token_ids": prompt.token_ids}


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return True
    return all(not isinstance(part, Mapping) or part.get("type") == "text" for part in content)
