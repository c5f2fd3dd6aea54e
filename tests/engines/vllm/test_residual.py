"""The residual rule on small models that return what vLLM's blocks return: fused pairs, stale residuals, bare tensors."""

import pytest
import torch
from torch import nn

from layertap.engines.vllm.layers import find_blocks
from layertap.engines.vllm.residual import check_forms, decide, input_tap, probe
from layertap.errors import UnsupportedModelError

HIDDEN, BLOCKS = 16, 3


class Mixer(nn.Module):
    """Attention without a cache: returns uninitialised memory."""

    def forward(self, x):
        return torch.full_like(x, float("nan"))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return out if residual is None else (out, x)


class IgnoringNorm(Norm):
    """Cohere's: takes a residual and ignores it."""

    def forward(self, x, residual=None):
        out = super().forward(x)
        return out if residual is None else (out, residual)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm = IgnoringNorm() if kind == "stale" else Norm()
        self.mixer = Mixer()
        self.mlp = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions, hidden_states, residual=None):
        if self.kind == "fused":
            normed, residual = (
                (self.norm(hidden_states), hidden_states) if residual is None else self.norm(hidden_states, residual)
            )
            return self.mlp(self.mixer(normed)), residual
        stream = hidden_states + self.mlp(self.mixer(self.norm(hidden_states)))
        if self.kind == "stale":
            return stream, hidden_states
        return (stream, None) if self.kind == "single" else stream


class Model(nn.Module):
    """`added` stands between blocks 0 and 1: what a vision model may add to the stream there."""

    def __init__(self, kind, norm=None, added=lambda hidden, residual: (hidden, residual)):
        super().__init__()
        self.added = added
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList([Block(kind) for _ in range(BLOCKS)])
        self.norm = norm or (IgnoringNorm() if kind == "stale" else Norm())

    def forward(self, ids):
        hidden, residual = self.embed(ids), None
        for index, layer in enumerate(self.layers):
            if index == 1:
                hidden, residual = self.added(hidden, residual)
            out = layer(ids, hidden, residual)
            hidden, residual = out if isinstance(out, tuple) else (out, None)
        out = self.norm(hidden) if residual is None else self.norm(hidden, residual)
        return out[0] if isinstance(out, tuple) else out


def probe_model(model):
    torch.manual_seed(0)
    blocks = find_blocks(model, BLOCKS, [])
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    with torch.no_grad():
        return probe(model, blocks, HIDDEN, mixers, lambda: model(torch.zeros(5, dtype=torch.long)))


@pytest.mark.parametrize(
    ("kind", "rule", "form"),
    [("fused", "sum", "pair"), ("stale", "first", "pair"), ("single", "first", "single"), ("bare", "first", "tensor")],
)
def test_the_stream_is_found_by_what_the_last_norm_reads(kind, rule, form):
    seen, output = probe_model(Model(kind))
    assert decide(seen, output, "model") == rule
    assert set(seen.forms.values()) == {form}
    assert seen.hidden_argument == 1
    check_forms(seen.forms, form, rule, "model")


def test_the_probe_leaves_the_model_as_it_was():
    model = Model("fused")
    probe_model(model)
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_model_whose_norm_reads_neither_is_refused_with_the_numbers():
    class Shifted(Norm):
        def forward(self, x, residual=None):
            if residual is None:
                return super().forward(x)
            out, stream = super().forward(x, residual)
            return out + 3.0, stream

    seen, output = probe_model(Model("fused", norm=Shifted()))
    with pytest.raises(UnsupportedModelError, match=r"first output: .*, sum of both outputs: "):
        decide(seen, output, "model")


def test_blocks_that_return_other_things_than_the_last_are_refused():
    model = Model("fused")
    seen, output = probe_model(model)
    rule = decide(seen, output, "model")
    seen.forms[1] = "tensor"
    with pytest.raises(UnsupportedModelError, match=r"blocks \[1\] return \['tensor'\]"):
        check_forms(seen.forms, "pair", rule, "model")


@pytest.mark.parametrize(
    ("kind", "added", "where"),
    [
        ("fused", lambda hidden, residual: (hidden + 0, residual), {1: (1, 2)}),
        ("fused", lambda hidden, residual: (hidden, residual + 0), {1: (1, 2)}),
        ("stale", lambda hidden, residual: (hidden + 0, residual), {1: (1, None)}),
        ("stale", lambda hidden, residual: (hidden, residual + 0), {}),
        ("bare", lambda hidden, residual: (hidden + 0, residual), {1: (1, None)}),
        ("fused", lambda hidden, residual: (hidden, residual), {}),
    ],
)
def test_a_stream_that_is_added_to_between_blocks_is_read_where_it_enters_the_next(kind, added, where):
    seen, output = probe_model(Model(kind, added=added))
    rule = decide(seen, output, "model")
    found = {index: input_tap(index, seen.entries.get(index), rule, "model") for index in range(1, BLOCKS)}
    assert {index: place for index, place in found.items() if place is not None} == where


def test_a_changed_stream_that_cant_be_found_among_a_blocks_arguments_is_refused():
    seen, _output = probe_model(Model("fused", added=lambda hidden, residual: (hidden + residual, None)))
    with pytest.raises(UnsupportedModelError, match="layer 1: the model changes the stream between blocks 0 and 1"):
        input_tap(1, seen.entries[1], "sum", "model")


def test_two_lists_of_that_length_are_refused_unless_attention_tells_them_apart():
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(2, 2) for _ in range(BLOCKS)])
            self.decoder = nn.ModuleList([nn.Linear(2, 2) for _ in range(BLOCKS)])

    with pytest.raises(UnsupportedModelError, match="can't be found with certainty"):
        find_blocks(Twin(), BLOCKS, [])
    assert find_blocks(Twin(), BLOCKS, ["decoder.0.self_attn.attn"]).path == "decoder"
