"""Ways are chosen by numbers: packed where packing is right, and never where a window, a state or a mask is lost."""

import pytest
import torch
from transformers import AttentionInterface, Gemma2PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from layertap.engines.transformers.passes import length_limit
from layertap.engines.transformers.selftest import Routes, _distinct_depth, choose_routes
from layertap.engines.transformers.weights import Layout
from layertap.testing import zoo


def routes_of(model, depth=None):
    layout = Layout(model)
    return choose_routes(model, layout, len(layout.names) if depth is None else depth)


def build(name):
    return zoo.build(name, attn_implementation="sdpa" if zoo.model_class(name)._supports_sdpa else "eager")


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3_text", "gpt_oss", "deepseek_v3", "olmo2"])
def test_models_whose_only_mixing_is_attention_are_packed(name):
    assert routes_of(build(name)).way == "packed"


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "llama4_text", "bloom", "mpt", "jamba", "recurrent_gemma"])
def test_models_that_leak_when_packed_are_padded(name):
    routes = routes_of(build(name))
    assert routes.way == "padded"
    assert "packed no" in routes.reason


def test_a_window_that_is_longer_than_the_sequences_is_still_tested():
    model = build("mistral")
    assert model.config.sliding_window == 8
    model.config.sliding_window = 100
    routes = routes_of(model)
    assert routes.packed
    assert routes.max_together is None
    assert model.config.sliding_window == 100


def test_a_window_that_packing_loses_is_found_though_it_is_long():
    model = build("llama4_text")
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.attention_chunk_size = 100
    assert not routes_of(model).packed


def test_a_window_that_could_not_be_tested_bounds_what_runs_together():
    model = build("llama")
    model.config.my_window_size = 50  # no layer looks at it, so shrinking it changes no row
    routes = routes_of(model)
    assert routes.packed
    assert routes.max_together == 50


def test_windows_of_a_vision_tower_bound_nothing():
    model = build("qwen2_5_vl")
    assert model.config.vision_config.window_size
    assert routes_of(model).max_together is None


@pytest.mark.parametrize("name", ["llama-dynamic-ntk", "phi3-longrope"])
def test_a_rotary_table_that_depends_on_the_length_bounds_what_runs_together(name):
    model = build(name)
    assert length_limit(model) == 16
    routes = routes_of(model)
    assert routes.max_together == 16
    assert "over 16 tokens go alone" in str(routes)


def test_soft_caps_that_sdpa_forgets_switch_to_eager(monkeypatch):
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # later versions say themselves that it doesn't
    assert routes_of(build("gemma2")).attention == "eager"
    assert routes_of(build("llama")).attention is None


def test_an_attention_that_gives_other_rows_than_eager_switches_to_eager(monkeypatch):
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        AttentionInterface._global_mapping,
        "sdpa",
        lambda *args, scaling, **others: own(*args, scaling=scaling / 2, **others),
    )
    routes = routes_of(build("llama"))
    assert routes.attention == "eager"
    assert "gives other rows" in routes.reason


def test_a_model_that_is_not_causal_goes_alone():
    model = build("llama")
    mix = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: mix(x) + x.mean(dim=1, keepdim=True)
    routes = routes_of(model)
    assert routes.way == "alone"
    assert "not causal" in routes.reason


def test_a_model_that_depends_on_its_batch_goes_alone():
    model = build("llama")
    mix = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: mix(x) * (1 + x.shape[0] + 0.0 * x)
    model.model.layers[2].mlp.forward = lambda x: mix(x) * (2.0 if x.shape[1] > 24 else 1.0)
    assert routes_of(model).way == "alone"


def test_a_model_that_leaks_only_in_deep_blocks_is_packed_where_it_is_shallow():
    model = build("llama")
    attention = model.model.layers[3].mlp
    plain = attention.forward
    attention.forward = lambda x: plain(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    assert routes_of(model, 3).packed
    assert not routes_of(model, 4).packed


def test_half_precision_noise_is_no_reason_to_go_alone():
    assert routes_of(build("llama").to(torch.bfloat16)).packed
    assert not routes_of(build("llama4_text").to(torch.bfloat16)).packed


def test_routes_print_as_one_sentence():
    routes = Routes(packed=False, padded=True, reason="packed no", max_together=9)
    assert str(routes) == "padded (up to 9 tokens): packed no"


@pytest.mark.parametrize(("name", "depth"), [("llama", 2), ("gpt2", 2), ("gemma3_text", 6), ("jamba", 3)])
def test_streamed_models_are_tested_until_each_kind_of_block_has_been_met(name, depth):
    model = build(name)
    assert _distinct_depth(Layout(model).blocks_of(model)) == depth
