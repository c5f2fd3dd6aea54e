"""The saved stream is the one that the model's own last norm would read; where there is none, that is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from layertap.capture.blocks import find_blocks
from layertap.capture.residual import Residual, find_residual
from layertap.errors import UnsupportedModelError
from layertap.testing import oracle, zoo

IDS = list(range(zoo.TOKEN_IDS.start, zoo.TOKEN_IDS.start + 24))


def tapped(model):
    """Streams [tokens, layers, hidden] of one run by our rule, through hooks."""
    blocks = find_blocks(model)
    seen = {}
    for index, block in enumerate(blocks.blocks):
        block.register_forward_pre_hook(
            lambda _block, args, kwargs, index=index: seen.__setitem__(index, blocks.entering(args, kwargs)),
            with_kwargs=True,
        )
    blocks.blocks[-1].register_forward_hook(
        lambda _block, _args, output: seen.__setitem__(blocks.num_layers, blocks.leaving(output))
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([IDS]), use_cache=False)
    return torch.stack([seen[layer][0] for layer in range(blocks.num_layers + 1)], dim=1)


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        ("gemma3n_text", "altup", "AltUp keeps 4 streams"),
        ("deepseek_v4", "hyper-connections", "hyper-connections keep 4 streams"),
        ("hy_v4", "hyper-connections", "'hc_head'"),
    ],
)
def test_of_several_streams_the_one_is_saved_that_a_truncated_model_gives_its_last_norm(name, kind, word):
    model = zoo.build(name)
    truth = oracle.hidden_states(model, IDS)
    blocks = find_blocks(model)
    assert blocks.residual.kind == kind
    assert word in blocks.residual.note
    torch.testing.assert_close(tapped(model), truth, rtol=1e-5, atol=1e-5)


def test_streams_that_are_mixed_behind_their_norm_are_refused_with_the_reason():
    with pytest.raises(UnsupportedModelError, match="no single stream that its last norm would read"):
        find_blocks(zoo.build_meta("qwen4_exp_text"))


class ChoosesAmongEarlierStates(nn.Module):
    def forward(self, hidden_states, block_states, attention_mask=None):
        return hidden_states


def test_streams_that_begin_anew_and_are_chosen_from_are_refused():
    with pytest.raises(
        UnsupportedModelError, match="choose among what it was before .'block_states'.*no single stream"
    ):
        find_residual(nn.Module(), [ChoosesAmongEarlierStates()], SimpleNamespace(), 8)


@pytest.mark.parametrize("name", ["reformer", "xlnet"])
def test_blocks_that_pass_on_two_streams_are_refused(name):
    with pytest.raises(UnsupportedModelError, match="two streams"):
        find_blocks(zoo.build_meta(name))


def test_altup_without_unembedding_projections_is_refused():
    block = nn.TransformerEncoderLayer(8, 2)
    block.forward = lambda hidden_states: hidden_states
    with pytest.raises(UnsupportedModelError, match="altup_num_inputs=3.*no 'altup_unembed_projections' of length 2"):
        find_residual(nn.Module(), [block], SimpleNamespace(altup_num_inputs=3), 8)


def test_shapes_that_are_no_stream_are_refused():
    rule = Residual(kind="single", note="", parameter="x", hidden_size=8)
    with pytest.raises(UnsupportedModelError, match=r"shape \(2, 8\), expected \[batch, tokens, 8\]"):
        rule.stream_of(torch.zeros(2, 8))
    with pytest.raises(UnsupportedModelError, match=r"shape \(1, 2, 16\)"):
        rule.leaving((torch.zeros(1, 2, 16), None))
    with pytest.raises(UnsupportedModelError, match="carries a str"):
        rule.leaving("stream")


def test_a_block_called_without_its_stream_is_said():
    rule = Residual(kind="single", note="", parameter="x")
    with pytest.raises(UnsupportedModelError, match=r"called without 'x'; it got \['mask'\]"):
        rule.entering((), {"mask": None})
