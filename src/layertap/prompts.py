"""Prompts: text, token ids or chat messages to checked token ids."""

import contextlib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layertap.chat_templates import variables
from layertap.engines.base import ModelInfo
from layertap.errors import OptionError, PromptError

_BYTES = (bytes, bytearray, memoryview)
"""Text that somebody forgot to decode: as numbers they would be ids of other tokens."""
_UNORDERED = (set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A checked prompt: its tokens, and its text where it was text."""

    token_ids: list[int]
    text: str | None = None


def as_prompt_list(prompts: Any) -> list[Any]:
    """One prompt or a list of them, as vLLM tells them apart: text, a mapping, or one list of ids is a single prompt.

    Raises:
        PromptError: neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, _BYTES):
        if prompts and all(isinstance(item, int) and not isinstance(item, bool) for item in prompts):
            return [prompts]
        return list(prompts)
    raise PromptError(f"prompts: expected text, token ids, a dict or a list of them, got {type(prompts).__name__}")


class PromptReader:
    """Turns what callers give into tokens that the model can run.

    Args:
        info: the model's limits.
        tokenizer: of transformers, or None (then only token ids are taken).
    """

    def __init__(self, info: ModelInfo, tokenizer: Any) -> None:
        self._info = info
        self._tokenizer = tokenizer

    def read(self, prompt: Any, *, room: int = 0) -> Prompt:
        """Check one prompt and tokenize it.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            room: tokens that must fit behind it (1 for a generation).

        Raises:
            PromptError: empty, too long, ids out of the vocabulary, or of no known form.
        """
        text: str | None = None
        if isinstance(prompt, Prompt):
            return self._checked(prompt.token_ids, prompt.text, room)
        if isinstance(prompt, Mapping):
            prompt = self._from_mapping(prompt)
        if isinstance(prompt, str):
            text = prompt
            ids = self._encode(prompt)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, (*_UNORDERED, *_BYTES)):
            ids = list(prompt)
        else:
            raise PromptError(f"prompt: expected text or token ids, got {type(prompt).__name__}")
        return self._checked(ids, text, room)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        room: int = 1,
    ) -> Prompt:
        """Apply the model's chat template.

        Raises:
            PromptError: messages of no known form, or no template.
            OptionError: both add_generation_prompt and continue_final_message.
        """
        if self._tokenizer is None:
            raise PromptError("chat: the model has no tokenizer (skip_tokenizer_init, or none was found)")
        if add_generation_prompt and continue_final_message:
            raise OptionError("continue_final_message: can't be combined with add_generation_prompt=True")
        if chat_template is None and getattr(self._tokenizer, "chat_template", None) is None:
            raise PromptError(
                "chat: the model's tokenizer has no chat template; give one as chat_template=..., take a tokenizer that has one "
                "(--tokenizer on the command line), or give text prompts"
            )
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise PromptError(f"messages[{number}]: expected a dict with 'role' and 'content', got {message!r}")

        read = [as_templates_read(message) for message in messages]

        def rendered(tools: list[Mapping[str, Any]] | None) -> str:
            with variables(self._tokenizer, chat_template_kwargs, chat_template=chat_template, tools=tools) as plain:
                text = self._tokenizer.apply_chat_template(
                    read,
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **plain,
                )
            return str(text)

        try:
            text = rendered(list(tools) if tools else None)
        except PromptError:
            raise
        except Exception as exc:  # jinja templates raise what they like
            raise PromptError(f"messages: the chat template refuses them: {exc}") from exc
        unseen = False
        with contextlib.suppress(Exception):  # a template that can't do without tools shows them
            unseen = bool(tools) and rendered(None) == text
        if unseen:
            raise PromptError("tools: the model's chat template doesn't show them to the model; leave them out")
        # the template writes the special tokens itself
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._checked(list(ids), text, room)

    def _from_mapping(self, prompt: Mapping[str, Any]) -> Any:
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
        if unknown:
            raise PromptError(
                f"prompt: the keys {unknown} can't be honoured here; expected 'prompt' (text) or 'prompt_token_ids' (ids)"
            )
        if prompt.get("prompt_token_ids") is not None:
            ids = prompt["prompt_token_ids"]
            if isinstance(ids, (str, *_BYTES, *_UNORDERED)) or not isinstance(ids, Iterable):
                raise PromptError(f"prompt_token_ids: expected a list of ids, got {type(ids).__name__}")
            return ids
        if not isinstance(prompt.get("prompt"), str):
            raise PromptError("prompt: expected 'prompt' (text) or 'prompt_token_ids' (ids)")
        return prompt["prompt"]

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise PromptError("prompt: text needs a tokenizer, and the model has none; give prompt_token_ids")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise PromptError(f"prompt: not valid text (a lone surrogate at character {exc.start})") from exc
        return list(self._tokenizer(text)["input_ids"])

    def _checked(self, ids: list[Any], text: str | None, room: int) -> Prompt:
        if not ids:
            raise PromptError("prompt: is empty; at least one token is needed")
        if set(map(type, ids)) != {int}:
            ids = [token if type(token) is int else _whole(token, place) for place, token in enumerate(ids)]
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= self._info.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise PromptError(
                f"prompt_token_ids[{ids.index(wrong)}]: {wrong} isn't in the vocabulary (0 to {self._info.vocab_size - 1})"
            )
        limit = self._info.max_model_len
        if len(ids) + room > limit:
            behind = f" (and {room} more must fit behind it)" if room else ""
            raise PromptError(f"prompt: has {len(ids)} tokens{behind}, the model's length is {limit}; shorten it")
        return Prompt(token_ids=ids, text=text)


def _whole(token: Any, place: int) -> int:
    """An integer of numpy or torch; nothing that would have to be rounded."""
    fractional = getattr(token, "dtype", None) is not None and "int" not in str(token.dtype)
    try:
        if not isinstance(token, bool) and not fractional:
            return operator.index(token)
    except TypeError:
        pass
    raise PromptError(f"prompt_token_ids[{place}]: expected a token id, got {token!r}")


def as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form of a message as text templates read it, and as vLLM gives it to them: a text, and a dict of arguments.

    Raises:
        PromptError: a part of its content isn't text, or arguments aren't a JSON object.
    """
    content = message.get("content")
    if content is None:
        message = {**message, "content": ""}
    if isinstance(calls := message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]}
    if not isinstance(content, list):
        return dict(message)
    parts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"messages: content parts of type {kind!r} can't be read by a text model")
        parts.append(part["text"])
    return {**message, "content": "\n".join(parts)}


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as exc:
        raise PromptError(f"messages: the arguments of a tool call aren't JSON: {exc}; got {text!r}") from exc
    if not isinstance(arguments, dict):
        raise PromptError(f"messages: the arguments of a tool call aren't a JSON object: got {text!r}")
    return {**call, "function": {**function, "arguments": arguments}}
