"""The sampler: one batch of logits, each row under its own request's rules, greedy beside sampled.

The order and the meaning of the steps are vLLM's: log probabilities of the raw logits; allowed ids; bad words; `min_tokens`;
`logit_bias`; repetition, frequency and presence penalties; then greedy rows take the maximum, the others go through
temperature, `min_p`, `top_k` and `top_p` and are drawn. A row with a seed has its own generator, so its tokens don't depend
on what else is in the batch; rows without one share a generator of the sampler. The caller's global generators are never
touched. A row that can't be sampled (not a number, or no token is left) fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["GREEDY_BELOW", "Draw", "SamplerRow", "SamplingRules", "TokenLogprob", "sample"]

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """One request's sampling, resolved to numbers and token ids; the names are those of `SamplingParams`.

    Attributes:
        held_back_ids: ids that end the sequence and therefore may not come before `min_tokens` tokens.
        bad_word_ids: token sequences whose last token may not complete them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    held_back_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def restricted(self) -> bool:
        """Whether some tokens are excluded or favoured."""
        return bool(self.allowed_ids is not None or self.bad_word_ids or self.logit_bias or self.min_tokens)

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token under the raw logits, and its place among all tokens (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(slots=True)  # not frozen: a step makes hundreds
class Draw:
    """What came out for one row.

    Attributes:
        token_id: the token, -1 if `error` is set.
        logprobs: the sampled token first, then the most likely ones; None if they weren't asked for.
        error: why there is no token.
    """

    token_id: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(slots=True)
class SamplerRow:
    """One request as the sampler sees it; `output_ids` is the live list that the caller appends to."""

    rules: SamplingRules
    prompt_ids: Sequence[int]
    output_ids: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None
    _counts: Tensor | None = None
    _counted: int = 0
    _in_prompt: Tensor | None = None

    def own_generator(self, device: torch.device) -> torch.Generator | None:
        """The request's generator, None where it has no seed."""
        if self.generator is None and self.rules.seed is not None:
            self.generator = torch.Generator(device).manual_seed(self.rules.seed)
        return self.generator

    def output_counts(self, vocab_size: int, device: torch.device) -> Tensor:
        """How often each token was generated so far, int [vocab]."""
        if self._counts is None:
            self._counts = torch.zeros(vocab_size, device=device)
        fresh = self.output_ids[self._counted :]
        if fresh:
            ids = torch.tensor(fresh, device=device)
            self._counts.index_add_(0, ids, torch.ones(len(fresh), device=device))
            self._counted = len(self.output_ids)
        return self._counts

    def in_prompt(self, vocab_size: int, device: torch.device) -> Tensor:
        """Which tokens the prompt has, bool [vocab]."""
        if self._in_prompt is None:
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._in_prompt[torch.tensor(list(self.prompt_ids), device=device)] = True
        return self._in_prompt


def sample(logits_BV: Tensor, rows: Sequence[SamplerRow], shared: torch.Generator) -> list[Draw]:
    """Choose the next token of every row.

    Args:
        logits_BV: one row of raw logits for each request.
        rows: the requests, in the order of the logits.
        shared: the generator, on the logits' device, that rows without a seed draw from.
    """
    raw_BV = logits_BV.float()
    scores_BV = raw_BV
    if any(row.rules.restricted or row.rules.penalized for row in rows):
        scores_BV = raw_BV.clone()
        _restrict(scores_BV, rows)
        _penalize(scores_BV, rows)
    # A row's maximum is NaN if one of its values is, infinite if one is, and minus infinity if no token is left.
    highest = raw_BV.amax(dim=1)
    broken = torch.isnan(highest) | (highest == torch.inf)
    empty = (highest if scores_BV is raw_BV else scores_BV.amax(dim=1)) == -torch.inf
    greedy_B = scores_BV.argmax(dim=1)
    chosen_B = greedy_B
    drawn = [i for i, row in enumerate(rows) if not row.rules.greedy]
    if drawn:
        chosen_B = greedy_B.clone()
        index = torch.tensor(drawn, device=scores_BV.device)
        chosen_B[index] = _draw(scores_BV[index], [rows[i] for i in drawn], shared)
    logprobs = _logprobs(raw_BV, chosen_B, rows)
    tokens, bad, stuck = chosen_B.tolist(), broken.tolist(), empty.tolist()
    return [
        Draw(-1, error="the model's logits are not finite numbers")
        if bad[i]
        else Draw(-1, error="no token is left to choose: the request's own rules exclude all of them")
        if stuck[i]
        else Draw(tokens[i], logprobs[i])
        for i in range(len(rows))
    ]


def _restrict(scores_BV: Tensor, rows: Sequence[SamplerRow]) -> None:
    """Allowed ids, bad words, min_tokens and logit_bias, in place."""
    for i, row in enumerate(rows):
        rules = row.rules
        if not rules.restricted:
            continue
        scores_V = scores_BV[i]
        if rules.allowed_ids is not None:
            allowed = torch.tensor(rules.allowed_ids, device=scores_V.device)
            kept = scores_V[allowed].clone()
            scores_V.fill_(-torch.inf)
            scores_V[allowed] = kept
        for word in rules.bad_word_ids:
            head = list(word[:-1])
            if not head or row.output_ids[-len(head) :] == head:
                scores_V[word[-1]] = -torch.inf
        if rules.held_back_ids and len(row.output_ids) < rules.min_tokens:
            scores_V[torch.tensor(rules.held_back_ids, device=scores_V.device)] = -torch.inf
        if rules.logit_bias:
            ids, values = zip(*rules.logit_bias, strict=True)
            scores_V[torch.tensor(ids, device=scores_V.device)] += torch.tensor(values, device=scores_V.device)


def _penalize(scores_BV: Tensor, rows: Sequence[SamplerRow]) -> None:
    """Repetition, frequency and presence penalties, in place."""
    penalized = [i for i, row in enumerate(rows) if row.rules.penalized]
    if not penalized:
        return
    device, vocab_size = scores_BV.device, scores_BV.shape[1]
    index = torch.tensor(penalized, device=device)
    some = [rows[i] for i in penalized]
    counts_PV = torch.stack([row.output_counts(vocab_size, device) for row in some])
    in_prompt_PV = torch.stack([row.in_prompt(vocab_size, device) for row in some])
    repetition, frequency, presence = (
        torch.tensor(values, device=device).unsqueeze(1)
        for values in zip(
            *((r.rules.repetition_penalty, r.rules.frequency_penalty, r.rules.presence_penalty) for r in some),
            strict=True,
        )
    )
    scores_PV = scores_BV[index]
    seen_PV = in_prompt_PV | (counts_PV > 0)
    repeated_PV = torch.where(scores_PV > 0, scores_PV / repetition, scores_PV * repetition)
    scores_PV = torch.where(seen_PV, repeated_PV, scores_PV)
    scores_BV[index] = scores_PV - frequency * counts_PV - presence * (counts_PV > 0)


def _draw(scores_SV: Tensor, rows: Sequence[SamplerRow], shared: torch.Generator) -> Tensor:
    """Temperature, min_p, top_k, top_p, and one token a row."""
    device = scores_SV.device
    vocab_size = scores_SV.shape[1]
    scores_SV = scores_SV / torch.tensor([row.rules.temperature for row in rows], device=device).unsqueeze(1)
    if any(row.rules.min_p > 0 for row in rows):
        probs_SV = scores_SV.softmax(dim=1)
        floor = torch.tensor([row.rules.min_p for row in rows], device=device).unsqueeze(1)
        scores_SV = scores_SV.masked_fill(probs_SV < floor * probs_SV.amax(dim=1, keepdim=True), -torch.inf)
    top_k = [row.rules.top_k if 0 < row.rules.top_k < vocab_size else vocab_size for row in rows]
    top_p = [row.rules.top_p for row in rows]
    if min(top_k) < vocab_size or min(top_p) < 1.0:
        scores_SV = _keep_top(scores_SV, torch.tensor(top_k, device=device), torch.tensor(top_p, device=device))
    probs_SV = scores_SV.softmax(dim=1)
    # Dividing by exponential noise and taking the maximum draws from the distribution without a pass per row.
    return (probs_SV / _noise(rows, probs_SV, shared)).argmax(dim=1)


def _keep_top(scores_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """All but the top_k, then all outside the top_p of what is left, become -inf."""
    sorted_SV, order_SV = scores_SV.sort(dim=1)
    kth = sorted_SV.gather(1, (sorted_SV.shape[1] - top_k_S).unsqueeze(1))
    sorted_SV = sorted_SV.masked_fill(sorted_SV < kth, -torch.inf)
    tail_SV = sorted_SV.softmax(dim=1).cumsum(dim=1)
    outside_SV = tail_SV <= 1 - top_p_S.unsqueeze(1)
    outside_SV &= (top_p_S < 1.0).unsqueeze(1)  # rounding must not cut the tail of a row that has no top_p
    outside_SV[:, -1] = False
    sorted_SV = sorted_SV.masked_fill(outside_SV, -torch.inf)
    return torch.empty_like(scores_SV).scatter_(1, order_SV, sorted_SV)


def _noise(rows: Sequence[SamplerRow], like_SV: Tensor, shared: torch.Generator) -> Tensor:
    """Exponential noise, each row from its own generator if it has one."""
    noise_SV = torch.empty_like(like_SV)
    own = [row.own_generator(like_SV.device) for row in rows]
    if None in own:
        noise_SV.exponential_(generator=shared)
    for i, generator in enumerate(own):
        if generator is not None:
            noise_SV[i].exponential_(generator=generator)
    return noise_SV


def _logprobs(raw_BV: Tensor, chosen_B: Tensor, rows: Sequence[SamplerRow]) -> list[tuple[TokenLogprob, ...] | None]:
    wanted = [i for i, row in enumerate(rows) if row.rules.logprobs is not None]
    result: list[tuple[TokenLogprob, ...] | None] = [None] * len(rows)
    if not wanted:
        return result
    index = torch.tensor(wanted, device=raw_BV.device)
    logprobs_WV = raw_BV[index].log_softmax(dim=1)
    sampled_W1 = logprobs_WV.gather(1, chosen_B[index].unsqueeze(1))
    ranks = (logprobs_WV >= sampled_W1).sum(dim=1).tolist()
    chosen, sampled = chosen_B[index].tolist(), sampled_W1[:, 0].tolist()
    vocab_size = raw_BV.shape[1]
    asked = [rows[i].rules.logprobs for i in wanted]
    tops = [vocab_size if n == -1 else min(n or 0, vocab_size) for n in asked]
    best_WK = logprobs_WV.topk(max(tops), dim=1)
    values, ids = best_WK.values.tolist(), best_WK.indices.tolist()
    for place, i in enumerate(wanted):
        best = zip(ids[place][: tops[place]], values[place][: tops[place]], strict=True)
        first = TokenLogprob(chosen[place], sampled[place], ranks[place])
        result[i] = (first, *(TokenLogprob(t, v, r) for r, (t, v) in enumerate(best, start=1)))
    return result
