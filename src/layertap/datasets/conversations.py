"""From a row of somebody's file to one prompt: text, token ids, or a chat.

A row is a mapping with exactly one of four fields: `prompt` (text), `prompt_token_ids`, `messages` (OpenAI) or
`conversations` (ShareGPT). Other keys are left alone, but for `tools` (with a chat) and `id`. Two of the four in one
row are an error, because either choice would be a guess: name one with `field`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import xxhash

from layertap.errors import PromptError

Field: TypeAlias = Literal["prompt", "prompt_token_ids", "messages", "conversations"]
FIELDS: tuple[Field, ...] = get_args(Field)

# The names that public ShareGPT-like sets use for the two sides.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text; the tokenizer's special tokens are added as the model's tokenizer has it."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is tokenized already."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


def parse_row(row: object, field: Field | None = None) -> Prompt:
    """Read one row.

    Args:
        row: what a line of JSONL or a row of Parquet holds.
        field: the field to read where a row has several.

    Raises:
        PromptError: the row holds no prompt, or more than one, or one that is mistyped. The message doesn't name the
            place; the caller knows it.
    """
    if not isinstance(row, Mapping):
        raise PromptError(f"expected an object with one of {', '.join(FIELDS)}, got {_kind(row)}")
    present = [name for name in FIELDS if row.get(name) is not None]
    if field is not None:
        if field not in present:
            raise PromptError(f"there is no {field!r} (keys: {_keys(row)})")
    elif len(present) > 1:
        raise PromptError(f"more than one prompt in a row ({', '.join(present)}); choose one by the option `field`")
    elif not present:
        raise PromptError(f"there is no prompt: expected one of {', '.join(FIELDS)} (keys: {_keys(row)})")
    name = field or present[0]
    if name == "prompt":
        return _parse_prompt(row[name])
    if name == "prompt_token_ids":
        return _parse_token_ids(name, row[name])
    tools = _parse_tools(row.get("tools"))
    if name == "messages":
        return ChatPrompt(_parse_messages(row[name]), tools)
    return ChatPrompt(_parse_sharegpt(row[name], row.get("system")), tools)


def check_text(what: str, text: str) -> str:
    """Refuse text that no tokenizer can take: half a surrogate pair, which JSON can spell as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise PromptError(f"{what}: character {exc.start} is half a surrogate pair ({text[exc.start]!r})") from None
    return text


def source_hash(prompt: Prompt) -> str:
    """Say by what to know the prompt again: an xxh3-128 over its content, the same from any file format."""
    content: object
    if isinstance(prompt, TextPrompt):
        content = ["text", prompt.text]
    elif isinstance(prompt, TokenPrompt):
        content = ["tokens", prompt.token_ids]
    else:
        content = ["chat", prompt.messages, prompt.tools]
    canonical = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(canonical.encode()))


def _parse_prompt(value: object) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise PromptError("prompt: the text is empty")
        return TextPrompt(check_text("prompt", value))
    if isinstance(value, Sequence):
        # the completions API takes ids here, too
        return _parse_token_ids("prompt", value)
    raise PromptError(f"prompt: expected text, got {_kind(value)}")


def _parse_token_ids(name: str, value: object) -> TokenPrompt:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise PromptError(f"{name}: expected a list of token ids, got {_kind(value)}")
    if not value:
        raise PromptError(f"{name}: the list is empty")
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(f"{name}[{position}]: expected a token id, got {_kind(token)} {_short(token)}")
        if not 0 <= token < 2**31:
            raise PromptError(f"{name}[{position}]: {_short(token)} can't be a token id")
    return TokenPrompt(tuple(value))


def _parse_tools(value: object) -> tuple[Mapping[str, Any], ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise PromptError(f"tools: expected a list of objects, got {_kind(value)}")
    _check_texts("tools", value)
    return tuple(value)


def _parse_messages(value: object) -> tuple[Mapping[str, Any], ...]:
    messages = []
    for place, message in _entries("messages", value):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise PromptError(f"{place}: expected a 'role', got {_short(role)} (keys: {_keys(message)})")
        content = message.get("content")
        calls = message.get("tool_calls")
        if content is None and not calls:
            raise PromptError(f"{place}: no 'content' (keys: {_keys(message)})")
        # exports of APIs spell out what isn't there
        given = {key: inner for key, inner in message.items() if inner is not None and key != "content"}
        if calls is not None:
            given["tool_calls"] = _parse_calls(place, calls)
        _check_texts(place, given)
        messages.append({**given, "content": _parse_content(place, content)})
    return tuple(messages)


def _parse_calls(place: str, calls: object) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise PromptError(f"{place}.tool_calls: expected a list of objects, got {_short(calls)}")
    return [{key: inner for key, inner in call.items() if inner is not None} for call in calls]


def _parse_content(place: str, content: object) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        return check_text(f"{place}.content", content)
    if not isinstance(content, Sequence):
        raise PromptError(f"{place}.content: expected text, got {_kind(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise PromptError(f"{place}.content: only parts of text can be taken, got {_short(part)}")
        texts.append(check_text(f"{place}.content", text))
    return "\n".join(texts)  # as `llm.chat`, our server and vLLM have it


def _parse_sharegpt(value: object, system: object) -> tuple[Mapping[str, Any], ...]:
    messages: list[Mapping[str, Any]] = []
    if system is not None and system != "":
        if not isinstance(system, str):
            raise PromptError(f"system: expected text, got {_kind(system)}")
        messages.append({"role": "system", "content": check_text("system", system)})
    for place, turn in _entries("conversations", value):
        # Parquet gives both names where one row has one and another row the other
        speaker = turn.get("role") if turn.get("from") is None else turn["from"]
        text = turn.get("content") if turn.get("value") is None else turn["value"]
        if not isinstance(speaker, str) or speaker.lower() not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise PromptError(f"{place}: 'from' is {_short(speaker)}, which is none of {known}")
        if not isinstance(text, str):
            raise PromptError(f"{place}: expected text in 'value', got {_kind(text)} (keys: {_keys(turn)})")
        role = SHAREGPT_ROLES[speaker.lower()]
        weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
        messages.append({"role": role, "content": check_text(f"{place}.value", text), **weight})
    return tuple(messages)


def _entries(name: str, value: object) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise PromptError(f"{name}: expected a list of turns, got {_kind(value)}")
    if not value:
        raise PromptError(f"{name}: the list is empty")
    entries = []
    for position, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise PromptError(f"{name}[{position}]: expected an object, got {_kind(entry)} {_short(entry)}")
        entries.append((f"{name}[{position}]", entry))
    return entries


def without_nulls(value: Any) -> Any:
    """Drop the keys that are null: Parquet gives every key of the column's type. In JSON a null is what somebody wrote."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(inner) for inner in value]
    return value


def _check_texts(place: str, value: Any) -> None:
    """`check_text` for everything that a template may show."""
    if isinstance(value, str):
        check_text(place, value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_texts(place, key)
            _check_texts(f"{place}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_texts(f"{place}[{number}]", inner)


def _keys(row: Mapping[str, Any]) -> str:
    return _short(", ".join(str(key) for key in row)) if row else "none"


def _kind(value: object) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number"}
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    # a number of thousands of digits can't be printed at all
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 10**30 else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
