"""From a record of the input to the tokens that are run, and which of them are trained."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from layertap.capture.spans import Spans
from layertap.datasets.conversations import ChatPrompt, TextPrompt, TokenPrompt
from layertap.datasets.inputs import InputRecord
from layertap.datasets.masks import LossMasks
from layertap.engines.base import ModelInfo
from layertap.errors import PromptError
from layertap.prompts import Prompt, PromptReader, as_templates_read

Kept: TypeAlias = Literal["all", "trained"]


class RecordTokenizer:
    """Tokenizes records one by one.

    Args:
        info: the model's limits.
        tokenizer: of transformers, or None (then only token ids are taken).
        add_generation_prompt: end each chat with the header of another turn.
        loss_mask: find the trained tokens of chats.
        positions: "trained": refuse what has no trained tokens.
        template_kwargs: further variables of the chat template.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Any,
        *,
        add_generation_prompt: bool = False,
        loss_mask: bool = True,
        positions: Kept = "all",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._add_generation_prompt = add_generation_prompt
        self._positions = positions
        self._template_kwargs = dict(template_kwargs or {})
        self._prompts = PromptReader(info, tokenizer)
        self._masks: LossMasks | None = None
        if loss_mask and getattr(tokenizer, "chat_template", None) is not None:
            self._masks = LossMasks(tokenizer, eos_token_ids=info.eos_token_ids, template_kwargs=self._template_kwargs)

    def read(self, record: InputRecord) -> tuple[Prompt, Spans | None]:
        """Return the prompt and the spans of its trained tokens (None: it has no mask).

        Raises:
            PromptError: it can't be run, or its turns can't be told.
        """
        prompt = record.prompt
        if isinstance(prompt, ChatPrompt):
            return self._read_chat(prompt)
        if self._positions == "trained":
            raise PromptError("positions 'trained' takes chats only: a prompt that isn't one has no loss mask")
        return self.prompt(prompt, room=0), None

    def prompt(self, source: TextPrompt | TokenPrompt | ChatPrompt, *, room: int) -> Prompt:
        """Return a prompt alone, with room for so many tokens behind it.

        Raises:
            PromptError: it can't be run.
        """
        if isinstance(source, ChatPrompt):
            return self._prompts.chat(
                source.messages,
                tools=source.tools,
                add_generation_prompt=self._add_generation_prompt,
                chat_template_kwargs=self._template_kwargs,
                room=room,
            )
        if isinstance(source, TextPrompt):
            return self._prompts.read({"prompt": source.text}, room=room)
        return self._prompts.read({"prompt_token_ids": list(source.token_ids)}, room=room)

    def turns(self, chat: ChatPrompt, prompt: Prompt) -> list[tuple[int, int]]:
        """Return the spans of the assistant's turns of a chat, in its tokens.

        Raises:
            PromptError: they can't be told.
        """
        if self._masks is None or prompt.text is None:
            return []
        return self._masks.spans(
            prompt.text,
            prompt.token_ids,
            [as_templates_read(message) for message in chat.messages],
            chat.tools,
            add_generation_prompt=self._add_generation_prompt,
        )

    def _read_chat(self, chat: ChatPrompt) -> tuple[Prompt, Spans | None]:
        prompt = self.prompt(chat, room=0)
        if self._masks is None or prompt.text is None:
            return prompt, None
        spans = self.turns(chat, prompt)
        if self._positions == "trained" and not spans:
            raise PromptError("positions 'trained': the chat has no turn of the assistant, so there is nothing to keep")
        return prompt, tuple(spans)


def trained_rows(mask: Spans) -> tuple[Spans, Spans]:
    """Say which positions are kept for a mask, and where its spans are among the kept rows.

    Kept are the trained tokens and the position before each run of them, whose row predicts the first of the run.
    """
    kept: list[tuple[int, int]] = []
    moved: list[tuple[int, int]] = []
    num_rows = 0
    for start, end in mask:
        first = max(start - 1, kept[-1][1] if kept else 0)
        if kept and kept[-1][1] == first:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((first, end))
        num_rows += end - first
        moved.append((num_rows - (end - start), num_rows))
    return tuple(kept), tuple(moved)
