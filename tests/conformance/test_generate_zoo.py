"""Generation over the zoo: greedy tokens of `model.generate`, rows of the oracle, whatever way the trial chose."""

import re

import pytest
import torch
from zoo_generation import TOLERANCE, Outcome, check, table

from layertap.testing import zoo

AWKWARD = [
    "llama",
    "gptj",
    "gpt_neo",
    "codegen",
    "xglm",
    "mpt",
    "falcon-alibi",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "deepseek_v32",
    "llama4_text",
    "mamba2",
    "lfm2",
    "nemotron",
    "stablelm",
    "qwen3_next",
    "phi3-longrope",
    "rwkv",
    "roberta",
    "qwen2_vl",
    "mllama",
]
"""One of each kind that once gave other tokens or rows somewhere; the others are slow tests."""

_TWO_STREAMS = "don't carry one residual stream"
_NO_BLOCKS = "can't be found with certainty"
_NOT_ONE_TO_ONE = r"a block carries \d+ rows for \d+ tokens"
REFUSED = {
    "blt": _NO_BLOCKS,
    "hrm_text": _NO_BLOCKS,
    "xlm": _NO_BLOCKS,
    "reformer": _TWO_STREAMS,
    "xlnet": _TWO_STREAMS,
    "qwen4_exp_text": "keeps 4 residual streams",
    "inkling2_text": "choose among what it was before",
    "inkling2_loop_text": "choose among what it was before",
    "dory": "ran out of turn",
    "cpmant": _NOT_ONE_TO_ONE,
    "prophetnet": _NOT_ONE_TO_ONE,
} | {name: "encoder-decoder" for name, case in zoo.CASES.items() if case.kind == "encoder-decoder"}
"""Models that don't generate here, each with the reason; every other case of the zoo has to be right."""

_STARTS_ELSEWHERE = "`generate` counts positions from 0, the model's own forward from the padding id"
OTHER_TOKENS = dict.fromkeys(
    (
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
    _STARTS_ELSEWHERE,
) | {"moshi": "its cache gives other rows than its own plain forward once its window is passed"}
"""Models whose `generate` in transformers gives other tokens than their own plain forward, which ours follow."""


@pytest.mark.parametrize(
    "name", [name if name in AWKWARD else pytest.param(name, marks=pytest.mark.slow) for name in zoo.CASES]
)
def test_tokens_are_those_of_generate_and_rows_those_of_the_oracle(name):
    torch.manual_seed(0)
    outcome = check(name)
    if name in REFUSED:
        assert outcome.way == "refused"
        assert re.search(REFUSED[name], outcome.reason), outcome.reason
        return
    assert outcome.error is not None, outcome.reason
    assert outcome.error <= TOLERANCE, outcome
    if name in OTHER_TOKENS:
        assert outcome.same_tokens is False
    elif outcome.same_tokens is None:
        assert outcome.note.startswith("model.generate:"), outcome
    else:
        assert outcome.same_tokens, outcome


def test_most_models_are_batched():
    ways = {
        name: check(name).way for name in ("llama", "mistral", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "gpt2")
    }
    assert set(ways.values()) == {"batched"}, ways


def test_every_exception_is_in_the_zoo():
    assert set(REFUSED) | set(OTHER_TOKENS) <= set(zoo.CASES) | set(zoo.NEWER)


def test_table_has_a_line_for_each_outcome():
    text = table(
        [
            Outcome(name="a", way="batched", reason="x|y", error=1e-6, same_tokens=True),
            Outcome(name="b", way="refused", reason="no"),
        ]
    )
    assert text.splitlines()[2:] == ["| a | batched | 1e-06 | yes | x\\|y |", "| b | refused |  |  | no |"]
