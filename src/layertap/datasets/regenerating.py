"""The model answers first: what `layertap extract --regenerate` puts in the place of the answers of its input.

Of a chat every turn of the assistant is dropped and answered anew, one after the other, each answer becoming the history of
the next; a chat (or a text) that ends without an answer gets one. Turns that call tools stay as they are: the results behind
them belong to them. The sample is the last answer's prompt and the tokens of that answer, exactly as they were generated;
trained are they, and of the earlier answers those whose tokens the chat template shows as they were generated.

An answer depends on its prompt, the options and the seed, which is derived for each turn from the place of the record in the
input; not on what runs beside it or when. So a run that was killed goes on with the same answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from layertap.capture.spans import Spans
from layertap.datasets.conversations import ChatPrompt
from layertap.datasets.inputs import InputRecord
from layertap.datasets.tokenizing import RecordTokenizer
from layertap.errors import LayertapError, OptionError
from layertap.llm import LLM
from layertap.params import SamplingParams
from layertap.prompts import Prompt

BATCH = 64
"""Records that are answered together before their states are taken."""
_FILTERS = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateOptions:
    """How the model answers. None: the model's own generation configuration says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 2048
    """Of each answer; where the model's length leaves room for less, that."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise OptionError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        SamplingParams(**{name: getattr(self, name) for name in _FILTERS if getattr(self, name) is not None})

    def identity(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """What decides the answers, for the manifest."""
        given = {name: getattr(self, name) for name in _FILTERS if getattr(self, name) is not None}
        return {**defaults, **given, "max_tokens": self.max_tokens, "seed": self.seed}


@dataclass(slots=True, kw_only=True)
class Answered:
    """A record with its answers."""

    record: InputRecord
    token_ids: list[int] = field(default_factory=list)
    """The last answer's prompt and that answer."""
    prompt_tokens: int = 0
    finish_reason: str = ""
    mask: Spans | None = None
    num_unshown: int = 0
    """Earlier answers that the chat template shows with other tokens, and that are therefore not trained."""
    error: LayertapError | None = None
    """Why there is none."""


@dataclass(slots=True)
class _Dialog:
    """A record on its way."""

    answered: Answered
    messages: list[Mapping[str, Any]]
    waiting: list[Mapping[str, Any] | None]
    """Messages that are still to come; None: an answer."""
    answers: list[list[int]] = field(default_factory=list)
    prompt: Prompt | None = None


class Answering:
    """Lets a model answer records.

    Args:
        llm: the model.
        options: how.
        tokenizer: reads the records; it was made for prompts that an answer follows.
        loss_mask: find the trained tokens.
    """

    def __init__(self, llm: LLM, options: RegenerateOptions, tokenizer: RecordTokenizer, *, loss_mask: bool) -> None:
        self._llm = llm
        self._options = options
        self._tokenizer = tokenizer
        self._loss_mask = loss_mask
        self._sampling = options.identity(llm.info.generation_defaults)
        self._max_len = llm.info.max_model_len

    def answer(self, records: Sequence[InputRecord]) -> Iterator[Answered]:
        """Answer records together, turn by turn; yields them in their order."""
        dialogs = [_open(record) for record in records]
        going = dialogs
        while going:
            asked = [dialog for dialog in going if self._ask(dialog)]
            prompts = [dialog.prompt for dialog in asked]
            outputs = self._llm.generate(prompts, [self._params(dialog) for dialog in asked], use_tqdm=False)
            for dialog, output in zip(asked, outputs, strict=True):
                choice = output.outputs[0]
                self._take(dialog, list(choice.token_ids), choice.finish_reason or "")
            going = [dialog for dialog in asked if dialog.waiting and dialog.answered.error is None]
        for dialog in dialogs:
            if self._loss_mask and dialog.answered.error is None:
                self._find_mask(dialog)
            yield dialog.answered

    def _ask(self, dialog: _Dialog) -> bool:
        """Make the prompt of the next answer; false if that fails."""
        while dialog.waiting and (message := dialog.waiting[0]) is not None:
            dialog.messages.append(message)
            dialog.waiting.pop(0)
        dialog.waiting.pop(0)
        source = dialog.answered.record.prompt
        try:
            if isinstance(source, ChatPrompt):
                source = ChatPrompt(tuple(dialog.messages), source.tools)
            dialog.prompt = self._tokenizer.prompt(source, room=1)
        except LayertapError as exc:
            dialog.answered.error = exc
            return False
        return True

    def _params(self, dialog: _Dialog) -> SamplingParams:
        index, turn = dialog.answered.record.index, len(dialog.answers)
        seed = xxhash.xxh3_64_intdigest(f"{self._options.seed} {index} {turn}".encode()) >> 33
        assert dialog.prompt is not None
        room = self._max_len - len(dialog.prompt.token_ids)
        return SamplingParams(
            **{**self._sampling, "seed": seed, "max_tokens": min(self._options.max_tokens, room)},
            extra_args={"kv_transfer_params": {"capture": False}},
        )

    def _take(self, dialog: _Dialog, token_ids: list[int], finish_reason: str) -> None:
        assert dialog.prompt is not None
        dialog.answers.append(token_ids)
        if dialog.waiting:
            ends = set(self._llm.info.eos_token_ids)
            content = token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids
            text = self._llm.get_tokenizer().decode(content, skip_special_tokens=True)
            dialog.messages.append({"role": "assistant", "content": text})
            return
        answered = dialog.answered
        answered.token_ids = [*dialog.prompt.token_ids, *token_ids]
        answered.prompt_tokens = len(dialog.prompt.token_ids)
        answered.finish_reason = finish_reason

    def _find_mask(self, dialog: _Dialog) -> None:
        answered = dialog.answered
        earlier = dialog.answers[:-1]
        found: list[tuple[int, int]] = []
        if earlier:
            source = answered.record.prompt
            assert isinstance(source, ChatPrompt)
            assert dialog.prompt is not None
            chat = ChatPrompt(tuple(dialog.messages), source.tools)
            try:
                spans = self._tokenizer.turns(chat, dialog.prompt)
            except LayertapError as exc:
                answered.error = exc
                return
            found = _shown(earlier, spans, answered.token_ids)
        answered.num_unshown = len(earlier) - len(found)
        answered.mask = (*found, (answered.prompt_tokens, len(answered.token_ids)))


def _open(record: InputRecord) -> _Dialog:
    """Find what is kept of a record, and where it is answered."""
    waiting: list[Mapping[str, Any] | None] = []
    asked = not isinstance(record.prompt, ChatPrompt)
    for message in record.prompt.messages if isinstance(record.prompt, ChatPrompt) else ():
        role = message.get("role")
        if role == "assistant" and not message.get("tool_calls") and asked:
            # several in a row are one answer
            waiting += [] if waiting[-1] is None else [None]
        else:
            asked = asked or role not in ("assistant", "system", "developer")
            waiting.append(message)
    return _Dialog(Answered(record=record), [], waiting if waiting and waiting[-1] is None else [*waiting, None])


def _shown(
    answers: Sequence[list[int]], spans: Sequence[tuple[int, int]], token_ids: Sequence[int]
) -> list[tuple[int, int]]:
    """The places of those answers that stand in the history as they were generated, in their order."""
    found: list[tuple[int, int]] = []
    left = list(spans)
    for answer in answers:
        for number, (start, end) in enumerate(left):
            if len(answer) <= end - start and list(token_ids[start : start + len(answer)]) == answer:
                found.append((start, start + len(answer)))
                left = left[number + 1 :]
                break
    return found
