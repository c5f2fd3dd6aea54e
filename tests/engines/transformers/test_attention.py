"""Packed attention against a plain softmax over each sequence by itself, and views that share weights and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from layertap.engines.transformers import attention
from layertap.engines.transformers.attention import (
    IMPLEMENTATION,
    NotPackable,
    Pack,
    configurations,
    packed,
    packed_attention,
    packed_attention_op,
    private_view,
)
from layertap.testing import zoo

CPU = torch.device("cpu")


def reference(q, k, v, lengths, scale, window=0, softcap=0.0, sinks=None):
    """Float64, one sequence, one head, one query at a time."""
    outputs, begin = [], 0
    groups = q.shape[1] // k.shape[1]
    for length in lengths:
        rows = torch.empty(length, q.shape[1], v.shape[-1], dtype=torch.float64)
        for head in range(q.shape[1]):
            for i in range(length):
                first = max(0, i - window + 1) if window else 0
                keys = k[0, head // groups, begin + first : begin + i + 1].double()
                logits = keys @ q[0, head, begin + i].double() * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head].double()[None]])
                weights = torch.softmax(logits, 0)[: len(keys)]
                rows[i, head] = weights @ v[0, head // groups, begin + first : begin + i + 1].double()
        outputs.append(rows)
        begin += length
    return torch.cat(outputs)


def random_qkv(lengths, heads=4, kv_heads=4, size=8, value_size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(1, heads, total, size), (1, kv_heads, total, size), (1, kv_heads, total, value_size)]
    return [torch.randn(shape, generator=generator) * 2 for shape in shapes]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    kv_heads=st.sampled_from([1, 2, 4]),
    value_size=st.sampled_from([8, 5]),
    window=st.sampled_from([0, 1, 3, 50]),
    softcap=st.sampled_from([0.0, 1.5]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([0.1, 0.35]),
)
def test_each_sequence_attends_to_itself_only(lengths, kv_heads, value_size, window, softcap, with_sinks, scale):
    q, k, v = random_qkv(lengths, kv_heads=kv_heads, value_size=value_size)
    sinks = torch.linspace(-1, 1, 4) if with_sinks else None
    with packed(Pack.of(lengths, CPU)):
        got = packed_attention(q, k, v, sinks, scale, window, softcap)
    exact = reference(q, k, v, lengths, scale, window, softcap, sinks)
    torch.testing.assert_close(got[0].double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 7, 600])
def test_sequences_longer_than_a_chunk_of_queries_are_right(monkeypatch, softcap, window):
    monkeypatch.setattr(attention, "_QUERY_CHUNK", 16)
    lengths = [50, 3, 41]
    q, k, v = random_qkv(lengths, heads=2, kv_heads=1)
    with packed(Pack.of(lengths, CPU)):
        got = packed_attention(q, k, v, None, 0.3, window, softcap)
    torch.testing.assert_close(got[0].double(), reference(q, k, v, lengths, 0.3, window, softcap), atol=2e-5, rtol=2e-5)


def test_a_row_without_its_pack_is_refused():
    q, k, v = random_qkv([4])
    with pytest.raises(NotPackable, match="4 tokens was run without a pack"):
        packed_attention(q, k, v, None, 1.0, 0, 0.0)
    with packed(Pack.of([2, 3], CPU)), pytest.raises(NotPackable):
        packed_attention(q, k, v, None, 1.0, 0, 0.0)


def test_a_pack_ends_with_its_context():
    q, k, v = random_qkv([2, 2])
    with packed(Pack.of([2, 2], CPU)):
        packed_attention(q, k, v, None, 1.0, 0, 0.0)
    with pytest.raises(NotPackable):
        packed_attention(q, k, v, None, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "a mask of its own|an attention mask of its own"),
        ({"is_causal": False}, "isn't causal"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "'position_bias'"),
        ({"something_new": torch.zeros(3)}, "'something_new'"),
    ],
)
def test_what_packed_attention_cannot_honour_is_refused(given, match):
    q, k, v = random_qkv([3])
    mask = given.pop("attention_mask", None)
    with packed(Pack.of([3], CPU)), pytest.raises(NotPackable, match=match):
        attention._attention(nn.Module(), q, k, v, mask, **given)


def test_cross_attention_is_refused():
    q, k, v = random_qkv([3])
    _, longer, values = random_qkv([5])
    with packed(Pack.of([3], CPU)), pytest.raises(NotPackable, match="isn't a packed row"):
        attention._attention(nn.Module(), q, longer, values, None)


def test_the_operator_is_traced_without_a_break_and_with_any_length():
    def block(q, k, v):
        return packed_attention_op(q * 2, k, v, None, 0.5, 0, 0.0) + 1

    compiled = torch.compile(block, backend="aot_eager", dynamic=True, fullgraph=True)
    for lengths in ([3, 4], [5, 1, 6], [12]):
        q, k, v = random_qkv(lengths)
        with packed(Pack.of(lengths, CPU)):
            torch.testing.assert_close(compiled(q, k, v), block(q, k, v))


def test_a_view_shares_weights_and_switches_attention_for_itself_only():
    model = zoo.build("gemma3", attn_implementation="sdpa")
    view = private_view(model, IMPLEMENTATION)
    assert {config._attn_implementation for config in configurations(view)} == {IMPLEMENTATION}
    assert IMPLEMENTATION not in {config._attn_implementation for config in configurations(model)}
    ours, theirs = dict(view.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    assert not {id(m) for m in view.modules()} & {id(m) for m in model.modules()}


def test_a_rotary_table_that_depends_on_the_length_is_each_views_own():
    model = zoo.build("phi3-longrope")
    one, other = private_view(model), private_view(model)
    before = other.model.rotary_emb.inv_freq.clone()
    one(torch.arange(9, 49)[None], use_cache=False)  # past the switch: transformers may overwrite the table in place
    assert not torch.equal(one.model.rotary_emb.inv_freq, before)
    assert torch.equal(other.model.rotary_emb.inv_freq, before)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_hooks_of_the_model_do_not_run_in_its_view():
    model = zoo.build("llama")
    calls: list[str] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: calls.append("model"))
    view = private_view(model)
    view(torch.tensor([[9, 10]]), use_cache=False)
    assert calls == []
    model(torch.tensor([[9, 10]]), use_cache=False)
    assert calls == ["model"]
