"""The loss mask of a chat: the tokens that the model itself would have generated, exact to the token.

These are, of each assistant turn, the content (with reasoning and tool calls, where the template shows them) and the token
that ends the turn; not the role header, not what the template writes behind the end of the turn.

Templates with `{% generation %}` say it themselves. For the others the turn is found by changing it: what differs between
two renderings, of the chat as it is and of the chat with another content in one message, is that content as the template
shows it, whatever the template did to it (trimmed it, cut its reasoning out, ...). Where the turn starts is known from the
generation prompt, which is what the template writes before the model takes over.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from layertap.chat_templates import variables
from layertap.errors import PromptError

Span: TypeAlias = tuple[int, int]
"""Half-open."""
Message: TypeAlias = Mapping[str, Any]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Private-use characters: no template knows them, so none of them can be taken for a part of what surrounds them.
_PROBES = ("\ue0a0", "\ue4b1", "\uf2c2")
_INSTRUCTIONS = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Generation prompts may open the reasoning ("<think>\n"), which turns of the history don't show.
_OPENED_REASONING = re.compile(r"(?:\s*[<\[]/?[^<>\[\]\s]*think[^<>\[\]\s]*[>\]])+\s*\Z", re.IGNORECASE)
_BLANK = re.compile(r"\s*")


class LossMasks:
    """Finds the trained tokens of chats of one tokenizer.

    Args:
        tokenizer: of transformers, with a chat template.
        eos_token_ids: the tokens that end a generation of the model.
        template_kwargs: further variables of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {str(token) for token in added.values() if token.special}
        special |= {str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
        ending = {
            str(tokenizer.convert_ids_to_tokens(token))
            for token in {*eos_token_ids, tokenizer.eos_token_id} - {None}
            if token < len(tokenizer)
        }
        self._special = _any_of(special | ending)
        self._ending = _any_of(ending)

    def spans(
        self,
        text: str,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[Span]:
        """Return the trained tokens as half-open spans, one a turn, in order.

        Args:
            text: the rendered chat.
            token_ids: its tokens.
            messages: the chat.
            tools: its tools.
            add_generation_prompt: whether `text` ends with the header of another turn.

        Raises:
            PromptError: it can't be told; the message says why.
        """
        chat = _Chat(self._tokenizer, list(messages), list(tools) if tools else None, self._kwargs, text)
        if _GENERATION.search(chat.template):
            turns = chat.marked_turns(add_generation_prompt)
        else:
            turns = [
                span
                for number, message in enumerate(messages)
                if message.get("role") == "assistant" and (span := self._turn(chat, number)) is not None
            ]
            chat.refuse_behind_common(turns)
        return self._to_tokens(text, token_ids, [turn for turn in turns if not self._is_silenced(chat, turn)])

    def _is_silenced(self, chat: "_Chat", turn: Span) -> bool:
        """Whether the turn is of a message that has `weight` 0: not to be trained, as OpenAI's fine-tuning format has it."""
        return any(turn[0] <= first and end <= turn[1] for first, end in chat.silenced())

    def _turn(self, chat: "_Chat", number: int) -> Span | None:
        """Find what the model made of message `number`, in characters; None if the template doesn't show the message."""
        found = chat.shown(chat.whole, number)
        if found is None:
            return None
        first, end = found
        start = chat.start_of(number, first)
        chat.refuse_instructions_within(number, start, first)
        return start, self._end_of(chat, number, end)

    def _end_of(self, chat: "_Chat", number: int, end: int) -> int:
        """Go from the end of the content to the end of the turn."""
        text = chat.whole.text
        if chat.messages[number].get("tool_calls"):
            # brackets of JSON and the like stand between what was changed and the end
            alone = chat.alone(number)
            shown = chat.shown(alone, number)
            closing = alone.text[shown[1] :].rstrip() if shown is not None else ""
            if text.startswith(closing, end):
                return end + len(closing)
            match = self._special.search(text, end)
            return end if match is None else match.end()
        behind = _end_of_blank(text, end)
        match = self._special.match(text, behind)
        if match is None:
            return end
        # where turns have no end of their own, what comes next is the header of another turn
        has_ending = self._ending.match(text, behind) or self._ends_in_special(chat.alone(number).text.rstrip())
        return match.end() if has_ending else end

    def _ends_in_special(self, text: str) -> bool:
        return any(text.endswith(token) for token in self._special.findall(text)[-1:])

    def _to_tokens(self, text: str, token_ids: Sequence[int], turns: Sequence[Span]) -> list[Span]:
        if not turns:
            return []
        try:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as exc:
            raise PromptError(
                "loss mask: this tokenizer doesn't say where its tokens stand in the text; run without loss masks"
            ) from exc
        if list(encoded["input_ids"]) != list(token_ids):
            raise PromptError(
                "loss mask: the chat gives other tokens when it is tokenized again; run without loss masks"
            )
        spans: list[Span] = []
        offsets: list[Span] = encoded["offset_mapping"]
        at = 0
        for first, end in turns:
            while at < len(offsets) and offsets[at][1] <= first:
                at += 1
            start = at
            while at < len(offsets) and offsets[at][0] < end:
                at += 1
            if at > start:
                spans.append((start, at))
        return spans


@dataclass(slots=True)
class _Rendering:
    messages: list[Message]
    text: str
    add_generation_prompt: bool
    shown: dict[int, Span | None] = field(default_factory=dict)


class _Chat:
    """One chat and its renderings."""

    def __init__(
        self,
        tokenizer: Any,
        messages: list[Message],
        tools: list[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        text: str,
    ) -> None:
        self.messages = messages
        self.template: str = tokenizer.get_chat_template(None, tools)
        self._tokenizer = tokenizer
        self._tools = tools
        self._kwargs = kwargs
        self._silenced: list[Span] | None = None
        self._probe = next((probe for probe in _PROBES if probe not in text), "")
        if not self._probe:
            raise PromptError("loss mask: the chat holds every private-use character that could mark a turn in it")
        # a header at the end would be no part of any turn, and is none of this rendering
        whole = self._render(messages, False)
        self.whole = _Rendering(messages, whole, False)
        self._text = text
        # templates may end a chat otherwise that no turn follows
        self._common = _common_prefix(text, whole)

    def refuse_behind_common(self, turns: Sequence[Span]) -> None:
        """Places were found in the chat as it is without a generation prompt: refuse those where the text that is run differs.

        Raises:
            PromptError: it does within the turns.
        """
        if turns and turns[-1][1] > self._common:
            raise PromptError(
                "loss mask: the chat template renders the chat differently each time, or with a generation prompt"
            )

    def silenced(self) -> list[Span]:
        """Where the contents of the assistant's messages are shown that have `weight` 0.

        Raises:
            PromptError: a weight is neither 0 nor 1.
        """
        if self._silenced is None:
            self._silenced = []
            for number, message in enumerate(self.messages):
                weight = message.get("weight", 1) if message.get("role") == "assistant" else 1
                if weight not in (0, 1):
                    raise PromptError(
                        f"loss mask: messages[{number}].weight: {weight!r} can't be honoured, only 0 (not trained) and 1"
                    )
                if not weight and (span := self.shown(self.whole, number)) is not None:
                    self._silenced.append(span)
        return self._silenced

    def marked_turns(self, add_generation_prompt: bool) -> list[Span]:
        """What stands between the template's own `{% generation %}` marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with variables(self._tokenizer, self._kwargs, tools=self._tools) as plain:
            rendered, indices = render_jinja_template(
                conversations=[self.messages],
                tools=self._tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=add_generation_prompt,
                **{**self._tokenizer.special_tokens_map, **plain},
            )
        if rendered[0] != self._text:
            raise PromptError("loss mask: the chat template renders the chat differently each time")
        return [(int(first), int(end)) for first, end in indices[0] if end > first]

    def refuse_instructions_within(self, number: int, start: int, first: int) -> None:
        """Refuse a turn before whose content, from `start` to `first`, the template shows what the model was told.

        Raises:
            PromptError: it does.
        """
        for earlier in range(number if start < first else 0):
            span = self.shown(self.whole, earlier) if self.messages[earlier].get("role") in _INSTRUCTIONS else None
            if span is not None and start <= span[0] < first:
                raise PromptError(
                    f"loss mask: messages[{number}]: the chat template shows messages[{earlier}] within this turn, so what the "
                    "model wrote can't be told; put a message of the user between them, or run without loss masks"
                )

    def alone(self, number: int) -> _Rendering:
        """The chat up to and with message `number`."""
        messages = self.messages[: number + 1]
        if len(messages) == len(self.messages):
            return self.whole
        return _Rendering(messages, self._render(messages, False), False)

    def start_of(self, number: int, first: int) -> int:
        """Where the model took over in turn `number`, whose content is first seen at `first`."""
        before = self.messages[:number]
        if not before:
            return self._start_of_first(first)
        prompt = _Rendering(before, self._render(before, True), True)
        start = self._taken_over(0, prompt.text)
        if start is None:
            # what stands further up is shown in another way: compare from the last message before that is shown
            for earlier in range(number - 1, -1, -1):
                here, there = self.shown(self.whole, earlier), self.shown(prompt, earlier)
                if here is not None and there is not None:
                    start = self._taken_over(here[1], prompt.text[there[1] :])
                    break
        if start is None:
            raise PromptError(
                f"loss mask: messages[{number}]: the chat template doesn't begin this turn with its generation prompt "
                f"({prompt.text[-80:]!r}), so the turn's start can't be told; run without loss masks"
            )
        return min(start, first)

    def _start_of_first(self, first: int) -> int:
        """Where the model took over in a turn that no message stands before: no template renders an empty chat."""
        asked: list[Message] = [{"role": "user", "content": self._probe}]
        prompt = self._render(asked, True)
        header = prompt[_common_prefix(prompt, self._render(asked, False)) :]
        opening = _OPENED_REASONING.sub("", header)
        if not opening.strip() or self.whole.text.count(opening, 0, first) != 1:
            raise PromptError(
                "loss mask: messages[0] is the assistant's, and the chat template doesn't show where the model took over "
                "before it; begin the chat with another message, or run without loss masks"
            )
        at = self.whole.text.index(opening)
        return min(at + _common_prefix(self.whole.text[at : at + len(header)], header), first)

    def _taken_over(self, at: int, header: str) -> int | None:
        """The end of the generation prompt `header` in the chat, where it stands at `at`."""
        common = _common_prefix(self.whole.text[at : at + len(header)], header)
        return at + common if common >= len(_OPENED_REASONING.sub("", header)) else None

    def shown(self, rendering: _Rendering, number: int) -> Span | None:
        """Where a rendering shows what can be changed in message `number`; None if nowhere."""
        if number not in rendering.shown:
            messages = list(rendering.messages)
            messages[number] = _changed(messages[number], self._probe)
            other = self._render(messages, rendering.add_generation_prompt)
            rendering.shown[number] = _difference(rendering.text, other)
        return rendering.shown[number]

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            with variables(self._tokenizer, self._kwargs, tools=self._tools) as plain:
                text = self._tokenizer.apply_chat_template(
                    messages,
                    tools=self._tools,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **plain,
                )
        except Exception as exc:  # jinja templates raise what they like
            raise PromptError(
                f"loss mask: the chat template refuses a part of the chat, or a changed message ({exc}), so the turns "
                "can't be told; run without loss masks"
            ) from exc
        return str(text)


def _changed(message: Message, probe: str) -> Message:
    """Put something else in the place of everything that somebody wrote."""
    changed = dict(message)
    has_calls = bool(message.get("tool_calls"))
    for name in ("content", *_REASONING):
        value = message.get(name)
        if isinstance(value, str) and (value or (name == "content" and not has_calls)):
            changed[name] = probe
    if has_calls:
        changed["tool_calls"] = [_changed_call(call, probe) for call in message["tool_calls"]]
    return changed


def _changed_call(call: Mapping[str, Any], probe: str) -> Mapping[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _changed_call(call["function"], probe)}
    # the name of a call may be shown again in the header of the tool's answer
    if isinstance(call.get("arguments"), Mapping):
        return {**call, "arguments": {probe: probe}}
    if isinstance(call.get("arguments"), str):
        return {**call, "arguments": f'{{"{probe}": "{probe}"}}'}
    return {**call, "name": probe}


def _difference(text: str, other: str) -> Span | None:
    """The span of `text` that `other` has something else for."""
    if text == other:
        return None
    first = _common_prefix(text, other)
    tail = _common_prefix(text[first:][::-1], other[first:][::-1])
    return first, len(text) - tail


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _end_of_blank(text: str, start: int) -> int:
    match = _BLANK.match(text, start)
    return start if match is None else match.end()


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
