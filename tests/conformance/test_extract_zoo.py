"""Extraction over the zoo: every row of every layer equals the oracle's, whatever way the self-test chose."""

import re

import pytest
import torch
from zoo_extraction import TOLERANCE, Outcome, check, table

from layertap.testing import zoo

AWKWARD = [
    "llama",
    "gptj",
    "gpt2",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "llama4_text",
    "mamba2",
    "lfm2",
    "bloom",
    "mpt",
    "falcon-alibi",
    "cohere",
    "llama-dynamic-ntk",
    "phi3-longrope",
    "mllama",
    "gemma3n_text",
    "qwen3_next",
]
"""One of each kind that once gave wrong rows somewhere; the others are slow tests."""

_TWO_STREAMS = "don't carry one residual stream"
_NO_BLOCKS = "can't be found with certainty"
_ENCODER_DECODER = "is an encoder-decoder model"
REFUSED = {
    "blt": _NO_BLOCKS,
    "hrm_text": _NO_BLOCKS,
    "xlm": _NO_BLOCKS,
    "reformer": _TWO_STREAMS,
    "xlnet": _TWO_STREAMS,
    "qwen4_exp_text": "keeps 4 residual streams",
    "inkling2_text": "choose among what it was before",
    "inkling2_loop_text": "choose among what it was before",
    "dory": "ran twice in one forward",
    "cpmant": "don't belong to the tokens one to one",
    "prophetnet": "don't belong to the tokens one to one",
    "evolla": "isn't a causal language model",
    "rwkv": "changes its own weights while it runs",
} | {name: _ENCODER_DECODER for name, case in zoo.CASES.items() if case.kind == "encoder-decoder"}
"""Models that extraction refuses, each with the reason; every other case of the zoo has to be right."""


@pytest.mark.parametrize(
    "name", [name if name in AWKWARD else pytest.param(name, marks=pytest.mark.slow) for name in zoo.CASES]
)
def test_rows_of_every_layer_equal_the_oracle(name, tmp_path):
    torch.manual_seed(0)
    outcome = check(name, tmp_path)
    if name in REFUSED:
        assert outcome.way == "refused"
        assert re.search(REFUSED[name], outcome.reason)
    else:
        assert outcome.error is not None, outcome.reason
        assert outcome.error <= TOLERANCE, outcome


def test_every_refused_case_is_in_the_zoo():
    assert set(REFUSED) <= set(zoo.CASES) | set(zoo.NEWER)


def test_table_has_a_line_for_each_outcome():
    text = table(
        [
            Outcome(name="a", way="packed", reason="x|y", error=1e-6),
            Outcome(name="b", way="refused", reason="no", error=None),
        ]
    )
    assert text.splitlines()[2:] == ["| a | packed | 1e-06 | x\\|y |", "| b | refused |  | no |"]
