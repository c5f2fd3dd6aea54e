"""The batched sampler against single-request math made of transformers' own logits processors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layertap.engines.transformers.sampler import SamplerRow, SamplingRules, sample

VOCAB = 23
tokens = st.integers(0, VOCAB - 1)


@st.composite
def sampler_rows(draw: st.DrawFn) -> SamplerRow:
    rules = SamplingRules(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 3, 10, VOCAB + 5])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([0.7, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([-0.5, 0.0, 0.4])),
        presence_penalty=draw(st.sampled_from([-0.5, 0.0, 1.5])),
        min_tokens=draw(st.integers(0, 4)),
        held_back_ids=tuple(draw(st.sets(tokens, max_size=3))),
        logit_bias=tuple(draw(st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 3.0]), max_size=3)).items()),
        allowed_ids=draw(st.none() | st.sets(tokens, min_size=12).map(tuple)),
        bad_word_ids=tuple(draw(st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=2))),
        logprobs=draw(st.sampled_from([None, 0, 4, -1])),
        seed=draw(st.integers(0, 2**31)),
    )
    prompt = draw(st.lists(tokens, min_size=1, max_size=8))
    return SamplerRow(rules, prompt, draw(st.lists(tokens, max_size=8)))


def expected_scores(row: SamplerRow, logits: torch.Tensor) -> torch.Tensor:
    """The scores of one request, step by step."""
    rules = row.rules
    scores = logits.clone()[None]
    if rules.allowed_ids is not None:
        others = [i for i in range(VOCAB) if i not in rules.allowed_ids]
        scores = SuppressTokensLogitsProcessor(others)(None, scores) if others else scores
    for *head, last in rules.bad_word_ids:
        if not head or row.output_ids[len(row.output_ids) - len(head) :] == head:
            scores[0, last] = -math.inf
    if len(row.output_ids) < rules.min_tokens and rules.held_back_ids:
        scores = SuppressTokensLogitsProcessor(list(rules.held_back_ids))(None, scores)
    for token, bias in rules.logit_bias:
        scores[0, token] += bias
    history = torch.tensor([[*row.prompt_ids, *row.output_ids]])
    scores = RepetitionPenaltyLogitsProcessor(rules.repetition_penalty)(history, scores)
    for token in set(row.output_ids):
        scores[0, token] -= rules.frequency_penalty * row.output_ids.count(token) + rules.presence_penalty
    return scores


def expected_token(row: SamplerRow, logits: torch.Tensor) -> int | None:
    rules = row.rules
    scores = expected_scores(row, logits)
    if bool(torch.isinf(scores).all()):
        return None
    if rules.temperature == 0:
        return int(scores.argmax())
    warpers = LogitsProcessorList([TemperatureLogitsWarper(rules.temperature)])
    if rules.min_p > 0:
        warpers.append(MinPLogitsWarper(rules.min_p))
    if 0 < rules.top_k < VOCAB:
        warpers.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1:
        warpers.append(TopPLogitsWarper(rules.top_p))
    probs = warpers(None, scores).softmax(dim=-1)[0]
    assert rules.seed is not None
    noise = torch.empty(VOCAB).exponential_(generator=torch.Generator().manual_seed(rules.seed))
    return int((probs / noise).argmax())


@settings(max_examples=150, deadline=None)
@given(st.lists(sampler_rows(), min_size=1, max_size=5), st.integers(0, 2**31))
def test_every_row_of_a_batch_gets_the_token_that_it_would_get_alone(rows: list[SamplerRow], seed: int):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    draws = sample(logits, rows, torch.Generator())
    for draw, row, row_logits in zip(draws, rows, logits, strict=True):
        token = expected_token(row, row_logits)
        if token is None:
            assert draw.error is not None
            assert "no token is left" in draw.error
        else:
            assert draw.error is None
            assert draw.token_id == token


@settings(max_examples=60, deadline=None)
@given(sampler_rows(), st.integers(0, 2**31))
def test_logprobs_are_those_of_the_raw_logits_with_ranks(row: SamplerRow, seed: int):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    (draw,) = sample(logits, [row], torch.Generator())
    if draw.error is not None or row.rules.logprobs is None:
        assert draw.logprobs is None or draw.error is not None
        return
    assert draw.logprobs is not None
    truth = logits[0].log_softmax(dim=-1)
    order = truth.argsort(descending=True).tolist()
    number = VOCAB if row.rules.logprobs == -1 else row.rules.logprobs
    sampled, *best = draw.logprobs
    assert sampled.token_id == draw.token_id
    assert [entry.token_id for entry in best] == order[:number]
    for entry in draw.logprobs:
        assert entry.logprob == pytest.approx(float(truth[entry.token_id]), abs=1e-5)
        assert entry.rank == order.index(entry.token_id) + 1


def test_penalties_follow_the_tokens_that_are_appended_between_calls():
    row = SamplerRow(SamplingRules(temperature=0, frequency_penalty=2.0, presence_penalty=0.5), [3])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for _ in range(12):
        (draw,) = sample(logits, [row], torch.Generator())
        assert draw.token_id == int(expected_scores(row, logits[0]).argmax())
        row.output_ids.append(draw.token_id)
    assert len(set(row.output_ids)) > 1


def test_a_seeded_row_draws_the_same_tokens_whatever_runs_beside_it():
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(VOCAB, generator=generator) for _ in range(10)]

    def draw_beside(others: int) -> list[int]:
        row = SamplerRow(SamplingRules(seed=7, top_p=0.95), [1])
        beside = [SamplerRow(SamplingRules(top_k=5), [2]) for _ in range(others)]
        found = []
        for logits in steps:
            batch = torch.stack([torch.randn(VOCAB, generator=generator) for _ in beside] + [logits])
            found.append(sample(batch, [*beside, row], torch.Generator().manual_seed(others))[-1].token_id)
        return found

    assert draw_beside(0) == draw_beside(1) == draw_beside(4)


def test_drawn_tokens_have_the_distribution_of_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    shared = torch.Generator().manual_seed(3)
    rows = [SamplerRow(SamplingRules(temperature=0.8), [0]) for _ in range(20_000)]
    found = torch.tensor([draw.token_id for draw in sample(logits.expand(len(rows), -1), rows, shared)])
    shares = torch.bincount(found, minlength=4) / len(rows)
    torch.testing.assert_close(shares, (logits / 0.8).softmax(dim=0), atol=0.012, rtol=0)


def test_a_row_that_is_not_finite_fails_alone():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[1, 4] = math.nan
    draws = sample(logits, [SamplerRow(SamplingRules(temperature=t), [1]) for t in (0, 1.0, 1.0)], torch.Generator())
    assert draws[1].token_id == -1
    assert draws[1].error == "the model's logits are not finite numbers"
    assert draws[0].token_id == int(logits[0].argmax())
    assert draws[2].error is None


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    rows = [SamplerRow(SamplingRules(seed=1), [1]), SamplerRow(SamplingRules(), [1])]
    sample(torch.zeros(2, VOCAB), rows, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())
