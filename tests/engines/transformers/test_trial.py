"""The trial that chooses how a model generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2PreTrainedModel

from layertap.engines.transformers.bench import Bench
from layertap.engines.transformers.trial import find_way
from layertap.testing import zoo
from layertap.testing.weights import randomise


def bench_of(model: Any) -> Bench:
    text = model.config.get_text_config(decoder=True)
    return Bench(model, text.num_hidden_layers, text.hidden_size, text.vocab_size)


def test_a_plain_decoder_is_batched_and_the_verdict_says_what_was_measured():
    verdict = find_way(bench_of(zoo.build("llama", attn_implementation="sdpa")), max_len=256)
    assert (verdict.way, verdict.attention, verdict.causal) == ("batched", "sdpa", True)
    assert verdict.row_error < 1e-5
    assert str(verdict).startswith("batched (sdpa): rows within")


@pytest.mark.parametrize("name", ["gpt_neox", "opt"])
def test_models_that_ask_the_paged_cache_for_more_than_it_has_are_batched_all_the_same(name):
    verdict = find_way(bench_of(zoo.build(name, attn_implementation="sdpa")), max_len=256)
    assert (verdict.way, verdict.attention) == ("batched", "sdpa")
    assert verdict.row_error < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_a_model_that_batches_wrongly_without_an_error_runs_one_at_a_time(name):
    verdict = find_way(bench_of(zoo.build(name)), max_len=256)
    assert verdict.way == "single"
    assert "not batched (eager: rows of a prompt" in verdict.reason


@pytest.mark.parametrize("name", ["gpt_neo", "mpt"])
def test_a_model_that_batching_cannot_run_runs_one_at_a_time(name):
    verdict = find_way(bench_of(zoo.build(name)), max_len=256)
    assert verdict.way == "single"
    assert "not batched (eager: " in verdict.reason


def test_a_soft_cap_that_torchs_attention_drops_leads_to_eager_attention(monkeypatch):
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # later versions say themselves that it doesn't
    verdict = find_way(bench_of(zoo.build("gemma2", attn_implementation="sdpa")), max_len=256)
    assert (verdict.way, verdict.attention) == ("single", "eager")
    assert "not single (sdpa: " in verdict.reason


def test_a_rotary_switch_far_beyond_the_prompts_of_the_trial_is_found_all_the_same():
    config = zoo.config("phi3-longrope")
    config.original_max_position_embeddings = 4096
    config.rope_parameters["original_max_position_embeddings"] = 4096
    config.max_position_embeddings = 16384
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = zoo.model_class("phi3-longrope")(config).float().eval()
    randomise(model, 0)
    assert find_way(bench_of(model), max_len=16384).way not in ("batched", "single")


def test_windows_are_brought_near_in_views_and_nowhere_else():
    model = zoo.build("mistral")
    model.config.sliding_window = 4096
    near, _ = bench_of(model).with_near_thresholds().view("eager")
    own, _ = bench_of(model).view("eager")
    assert near.config.sliding_window == 8
    assert own.config.sliding_window == model.config.sliding_window == 4096


def test_a_trial_leaves_the_model_as_it_was():
    model = zoo.build("llama", attn_implementation="sdpa")
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    state = torch.get_rng_state()
    find_way(bench_of(model), max_len=64)
    assert {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()} == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
