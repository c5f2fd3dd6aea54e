"""Layers that are finished in their first forward, as 8-bit layers of bitsandbytes are: no way must run on their raw codes."""

import pytest
import torch
from torch import nn

from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.selftest import choose_routes
from layertap.engines.transformers.weights import Layout
from layertap.errors import UnsupportedModelError
from layertap.testing import oracle, zoo

PROMPTS = [[9, 10, 11, 12, 13, 14], [30, 31, 32]]


class State:
    scale = None


class ForgottenState(State):
    def __deepcopy__(self, memo):
        return ForgottenState()


class Finishing(nn.Module):
    """The scale stands at the weight until the first forward, and in the layer's state from then on."""

    def __init__(self, linear, state):
        super().__init__()
        scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round(), requires_grad=False)
        self.weight.scale = scale
        self.state = state

    def forward(self, hidden):
        if self.weight.scale is not None:
            self.state.scale, self.weight.scale = self.weight.scale, None
        scale = self.state.scale if self.state.scale is not None else 1.0
        return nn.functional.linear(hidden, self.weight * scale)


def quantized(state):
    """A model with such layers, and the plain one that has the same numbers."""
    model, plain = zoo.build("llama"), zoo.build("llama")
    for block, same in zip(model.model.layers, plain.model.layers, strict=True):
        for name in ("q_proj", "o_proj"):
            layer = Finishing(getattr(block.self_attn, name), state())
            setattr(block.self_attn, name, layer)
            getattr(same.self_attn, name).weight.data = layer.weight * layer.weight.scale
    model.hf_quantizer = object()
    return model, plain


def test_rows_of_every_way_are_those_of_the_finished_layers():
    model, plain = quantized(State)
    layout = Layout(model)
    routes = choose_routes(model, layout, 4)
    assert routes.packed
    passes = Passes(model, layout, routes.attention)
    for way in ("packed", "padded"):
        rows = torch.zeros(9, 5, layout.hidden_size)
        passes.run(way, PROMPTS, [range(6), range(3)], range(5), rows)
        exact = torch.cat([oracle.hidden_states(plain, prompt) for prompt in PROMPTS])
        assert float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).max()) < 1e-4
    assert not model.model.layers[0]._forward_pre_hooks


def test_layers_that_cannot_be_shared_are_refused_instead_of_giving_other_rows():
    model, _ = quantized(ForgottenState)
    with pytest.raises(UnsupportedModelError, match=r"quantized layers can't be shared .*rows differ by"):
        choose_routes(model, Layout(model), 4)
