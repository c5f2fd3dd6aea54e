"""Incremental text against the tokenizer's own decoding of everything at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.engines.transformers.detokenize import Detokenizer, find_stop
from layertap.testing.tokenizer import byte_tokenizer

TOKENIZER: Any = byte_tokenizer()


class PythonOnly:
    """The same tokenizer without the library's incremental decoder, as tokenizers in Python are."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> Any:
        return TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens)


kinds = pytest.mark.parametrize("tokenizer", [TOKENIZER, PythonOnly()], ids=["fast", "python"])


def feed(detokenizer: Detokenizer, token_ids: list[int]) -> tuple[str, str | None]:
    """Feed until a stop string, as the loop does; the streamed text and the stop string."""
    streamed, stop = "", None
    for i, token_id in enumerate(token_ids):
        stop = detokenizer.feed(token_id)
        last = stop is not None or i == len(token_ids) - 1
        streamed += detokenizer.take(finished=last)
        if last:
            break
    return streamed, stop


@kinds
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd\x00"), max_size=30))
def test_streamed_text_is_the_text_of_all_tokens(tokenizer, text):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, TOKENIZER.encode("Hi: "))
    streamed, stop = feed(detokenizer, token_ids)
    assert stop is None
    assert streamed == detokenizer.text == TOKENIZER.decode(token_ids, skip_special_tokens=True)


@kinds
def test_a_character_comes_out_whole_or_not_at_all(tokenizer):
    token_ids = TOKENIZER.encode("aé€", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [9])
    pieces = []
    for token_id in token_ids[:-1]:
        detokenizer.feed(token_id)
        pieces.append(detokenizer.take(finished=False))
    assert "".join(pieces) == "aé"
    assert "\ufffd" not in detokenizer.text


def expected_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that ends first, found in the finished text."""
    ends = [(text.find(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in text]
    if not ends:
        return text, None
    end, i = min(ends)
    return (text[:end] if include else text[: end - len(stops[i])]), stops[i]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc ", max_size=25),
    stops=st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
)
def test_stop_strings_cut_the_text_where_they_end_first_and_nothing_past_them_is_streamed(text, stops, include):
    token_ids = [TOKENIZER.encode(c, add_special_tokens=False)[0] for c in text]
    detokenizer = Detokenizer(TOKENIZER, [9], stops=stops, include_stop=include)
    streamed, stop = feed(detokenizer, token_ids)
    assert (streamed, stop) == expected_cut(text, stops, include)
    assert streamed == detokenizer.text


def test_a_stop_string_that_began_within_min_tokens_counts_once_it_ends_after_them():
    detokenizer = Detokenizer(TOKENIZER, [9], stops=["ab"], min_tokens=2)
    token_ids = [TOKENIZER.encode(c, add_special_tokens=False)[0] for c in "abab"]
    stops = [detokenizer.feed(token_id) for token_id in token_ids]
    assert stops == [None, None, None, "ab"]
    assert detokenizer.text == "ab"


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for():
    word = TOKENIZER.encode("x", add_special_tokens=False)[0]
    for include, text in ((False, ""), (True, "x")):
        detokenizer = Detokenizer(TOKENIZER, [9], include_stop=include)
        detokenizer.feed(word, ends_sequence=True)
        assert detokenizer.text == text


def test_special_tokens_have_text_only_if_they_are_not_skipped():
    for skip, text in ((True, "a"), (False, "a<eos>")):
        detokenizer = Detokenizer(TOKENIZER, [9], skip_special_tokens=skip)
        for token_id in (*TOKENIZER.encode("a", add_special_tokens=False), TOKENIZER.eos_token_id):
            detokenizer.feed(token_id)
        assert detokenizer.text == text


def test_padding_rows_of_an_embedding_have_no_text():
    detokenizer = Detokenizer(TOKENIZER, [9])
    assert detokenizer.feed(len(TOKENIZER) + 100) is None
    assert detokenizer.text == ""


@pytest.mark.parametrize(
    ("text", "new_chars", "found"),
    [("xab", 1, ("ab", 1)), ("abx", 1, None), ("abx", 3, ("ab", 0)), ("", 0, None)],
)
def test_only_stop_strings_that_end_in_the_new_text_are_found(text, new_chars, found):
    assert find_stop(text, new_chars, ["ab"]) == found
