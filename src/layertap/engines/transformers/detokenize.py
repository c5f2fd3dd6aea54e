"""Text from tokens while they are generated, and the stop strings in it.

Text comes out in whole characters only: a token that ends in the middle of one waits for the next. Stop strings are looked
for in the text, not in the tokens, and what could still turn out to be the beginning of one is held back from the stream.
The rules are vLLM's: nothing is looked for in the first `min_tokens` tokens, the stop string that ends first wins, the text
is cut before it (after it with `include_stop_str_in_output`), and the text of a token that ended the sequence is left out.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

__all__ = ["Detokenizer", "Tokenizer", "find_stop"]


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any:
        """Text of a list of ids."""


def find_stop(text: str, new_chars: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """Find the stop string that ends first among those that end in the last `new_chars` characters.

    Returns:
        The stop string and where it begins.
    """
    found = [
        (at + len(stop), order, stop, at)
        for order, stop in enumerate(stops)
        if (at := text.find(stop, max(0, len(text) - new_chars - len(stop) + 1))) != -1
    ]
    if not new_chars or not found:
        return None
    _, _, stop, at = min(found)
    return stop, at


class Detokenizer:
    """The text of one sequence, fed token by token.

    Attributes:
        text: all text so far; cut at the stop string once one was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self.text = ""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held_back = max(len(stop) for stop in stops) - 1 if stops and not include_stop else 0
        self._num_tokens = 0
        self._streamed = 0
        self._decoder = _decoder(tokenizer, prompt_ids, skip_special_tokens)

    def feed(self, token_id: int, *, ends_sequence: bool = False) -> str | None:
        """Take the next token.

        Args:
            token_id: the token.
            ends_sequence: it is an end-of-sequence or stop token, whose own text isn't part of the output.

        Returns:
            The stop string that the text now has, if any.
        """
        self._num_tokens += 1
        if ends_sequence and not self._include_stop:
            return None
        fresh = self._decoder.step(token_id)
        self.text += fresh
        if not self._stops or self._num_tokens <= self._min_tokens:
            return None
        found = find_stop(self.text, len(fresh), self._stops)
        if found is None:
            return None
        stop, at = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop

    def take(self, *, finished: bool) -> str:
        """The text since the last call, less what may still become a stop string."""
        end = len(self.text) if finished else max(self._streamed, len(self.text) - self._held_back)
        fresh = self.text[self._streamed : end]
        self._streamed = end
        return fresh


class _Decoder(Protocol):
    def step(self, token_id: int) -> str: ...


def _decoder(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> _Decoder:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _StreamDecoder(backend, prompt_ids, skip_special_tokens)
    return _WindowDecoder(tokenizer, prompt_ids, skip_special_tokens)


class _StreamDecoder:
    """The incremental decoder of the `tokenizers` library."""

    def __init__(self, backend: Any, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        if token_id >= self._backend.get_vocab_size(with_added_tokens=True):
            return ""  # rows of padding at the end of an embedding have no text
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that are no valid text confuse the library's state; a new one goes on from here.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            text = self._stream.step(self._backend, token_id)
        return text or ""


class _WindowDecoder:
    """For tokenizers in Python: decode a window with and without the new tokens, the difference is their text."""

    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = list(prompt_ids[-self._CONTEXT :])
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._context, self._pending = self._pending, []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))
