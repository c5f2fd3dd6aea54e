"""What ends a sequence, in vLLM's order of precedence."""

from __future__ import annotations

import pytest

from layertap.engines.transformers.stopping import Finish, StopRules

RULES = StopRules(eos_id=2, stop_ids={5, 6}, max_tokens=3, max_len=10)


@pytest.mark.parametrize(
    ("token_id", "num_generated", "prompt_len", "finish"),
    [
        (9, 1, 4, None),
        (2, 1, 4, Finish("stop", None, ended_by_token=True)),
        (5, 1, 4, Finish("stop", 5, ended_by_token=True)),
        (9, 3, 4, Finish("length")),
        (9, 2, 8, Finish("length")),
        (2, 3, 4, Finish("stop", None, ended_by_token=True)),
        (6, 3, 4, Finish("stop", 6, ended_by_token=True)),
    ],
)
def test_the_first_rule_that_holds_ends_the_sequence(token_id, num_generated, prompt_len, finish):
    assert RULES.check(token_id, num_generated, prompt_len) == finish


def test_without_an_end_of_sequence_token_only_stop_ids_and_length_end_it():
    rules = StopRules(eos_id=None, stop_ids=(), max_tokens=2, max_len=100)
    assert rules.check(2, 1, 5) is None
    assert rules.check(2, 2, 5) == Finish("length")
