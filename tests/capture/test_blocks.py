"""Blocks are found in every model of the zoo by structure; what is not certain is refused with the candidates."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from layertap.capture.blocks import find_blocks
from layertap.errors import UnsupportedModelError
from layertap.testing import zoo

REFUSED = {
    "blt": "model.local_decoder.layers",
    "hrm_text": "model.L_module.layers",
    "inkling2_loop_text": "'block_states'",
    "inkling2_text": "'block_states'",
    "qwen4_exp_text": "keeps 4 residual streams",
    "reformer": "'prev_attn_output'",
    "xlm": "transformer.attentions",
    "xlnet": "'output_h'",
}
"""Models of the zoo without a list of blocks or without one stream, and what the refusal has to name."""


def names():
    return [pytest.param(name, marks=() if name in zoo.AWKWARD else pytest.mark.slow) for name in zoo.CASES]


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, hidden_states):
        return hidden_states + self.down(self.up(self.norm(hidden_states)))


class Toy(nn.Module):
    """Lists of blocks under the names given, and a configuration with the fields given."""

    def __init__(self, lists, block=Block, **config):
        super().__init__()
        if config:
            self.config = SimpleNamespace(**config)
        for name, length in lists.items():
            setattr(self, name, nn.ModuleList(block() for _ in range(length)))


class Codes(nn.Module):
    """A quantized layer without parameters, as those of gptqmodel."""

    def __init__(self, size=8):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(size, size // 8, dtype=torch.int32))


class QuantizedBlock(Block):
    def __init__(self, size=8):
        super().__init__(size)
        self.up, self.down = Codes(size), Codes(size)


class MaskedNorms(nn.Module):
    """No block: what it holds are buffers of another kind."""

    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.register_buffer("mask", torch.ones(size, size, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(size, size))


def test_blocks_whose_weights_are_codes_in_buffers_are_blocks_and_masks_and_tables_make_none():
    assert find_blocks(Toy({"layers": 3}, QuantizedBlock, num_hidden_layers=3)).num_layers == 3
    with pytest.raises(UnsupportedModelError, match="less than two weight matrices"):
        find_blocks(Toy({"layers": 3}, MaskedNorms, num_hidden_layers=3))


@pytest.mark.parametrize("name", names())
def test_every_model_of_the_zoo_is_found_on_the_meta_device_or_refused(name):
    model = zoo.build_meta(name)
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[name].replace(".", r"\.")):
            find_blocks(model)
        return
    blocks = find_blocks(model)
    config = model.config.get_text_config(decoder=True)
    assert blocks.num_layers in {
        getattr(config, field, None)
        for field in ("num_hidden_layers", "num_layers", "decoder_layers", "num_decoder_layers")
    }
    assert list(model.get_submodule(blocks.container_path).children()) == blocks.blocks
    assert model.get_submodule(blocks.decoder_path) is blocks.decoder
    assert blocks.hidden_size == config.hidden_size
    recorded = (getattr(blocks.decoder, "_can_record_outputs", None) or {}).get("hidden_states")
    for target in (
        recorded if isinstance(recorded, list) else [recorded]
    ):  # transformers' own word for blocks, where it has one
        kind = getattr(target, "target_class", target)
        assert kind is None or any(isinstance(block, kind) for block in blocks.blocks)
    printed = str(blocks)
    assert f"{blocks.num_layers} blocks at {blocks.container_path}" in printed
    assert "because" in printed
    assert "stream: " in printed


@pytest.mark.parametrize(
    ("name", "path", "decoder"),
    [
        ("gpt2", "transformer.h", "transformer"),
        ("opt", "model.decoder.layers", "model.decoder"),
        ("bert", "bert.encoder.layer", "bert.encoder"),
        ("mamba2", "backbone.layers", "backbone"),
        ("zamba2", "model.layers", "model"),
        ("gemma3", "model.language_model.layers", "model.language_model"),
        ("git", "git.encoder.layer", "git.encoder"),
        ("phi4_multimodal", "model.layers", "model"),
        ("whisper-encoder-decoder", "model.decoder.layers", "model.decoder"),
        ("t5", "decoder.block", "decoder"),
        ("longcat_flash", "model.layers", "model"),
        ("modernbert-decoder", "model.layers", "model"),
    ],
)
def test_the_text_decoder_is_meant(name, path, decoder):
    blocks = find_blocks(zoo.build_meta(name))
    assert (blocks.container_path, blocks.decoder_path) == (path, decoder)


def test_vision_towers_are_named_as_what_was_not_taken():
    assert "not model.vision_tower.encoder.layers: 4 x SiglipEncoderLayer" in str(find_blocks(zoo.build_meta("gemma3")))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_model_without_its_head_is_found_too(name):
    whole = zoo.build_meta(name)
    blocks = find_blocks(whole.base_model)
    assert blocks.blocks == find_blocks(whole).blocks


def test_two_lists_that_fit_are_refused_with_both_named():
    with pytest.raises(UnsupportedModelError, match="2 lists fit") as refusal:
        find_blocks(Toy({"fast": 3, "slow": 3}, num_hidden_layers=3))
    assert "fast: 3 x Block" in str(refusal.value)
    assert "slow: 3 x Block" in str(refusal.value)
    assert "num_hidden_layers=3" in str(refusal.value)


def test_two_lists_without_a_configuration_are_refused():
    with pytest.raises(UnsupportedModelError, match="2 lists fit; the configuration gives no number of layers"):
        find_blocks(Toy({"fast": 3, "slow": 4}))


def test_a_list_of_another_length_than_the_configuration_says_is_refused():
    with pytest.raises(UnsupportedModelError, match="no list of blocks fits") as refusal:
        find_blocks(Toy({"layers": 5}, num_hidden_layers=4))
    assert "layers: 5 x Block" in str(refusal.value)


def test_no_list_at_all_is_said():
    with pytest.raises(UnsupportedModelError, match="no list of modules at all"):
        find_blocks(nn.Linear(2, 2))


def test_a_list_of_multi_token_prediction_layers_is_left_out():
    assert find_blocks(Toy({"layers": 4, "mtp_layers": 1}, num_hidden_layers=4)).container_path == "layers"


def test_prediction_layers_at_the_end_of_the_list_are_left_out_and_said():
    model = Toy({"layers": 5}, num_hidden_layers=4, num_nextn_predict_layers=1)
    blocks = find_blocks(model)
    assert blocks.blocks == list(model.layers)[:4]
    assert "last 1 are extra multi-token-prediction layers" in str(blocks)


def test_experts_inside_of_blocks_are_no_candidates():
    class Expert(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(4))

    blocks = find_blocks(Toy({"layers": 4}, block=Expert, num_hidden_layers=4))
    assert [candidate.path for candidate in blocks.candidates] == ["layers"]


def test_one_module_at_several_depths_is_refused():
    model = Toy({"layers": 2}, num_hidden_layers=2)
    model.layers[1] = model.layers[0]
    with pytest.raises(UnsupportedModelError, match="the same module at several depths"):
        find_blocks(model)


def test_norms_and_projections_in_lists_are_not_blocks():
    model = Toy({"layers": 3}, num_hidden_layers=3)
    model.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
    model.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    blocks = find_blocks(model)
    assert blocks.container_path == "layers"
    assert "norms: 3 x LayerNorm - not blocks" in str(blocks)


def test_a_found_toy_runs_through_its_rule():
    model = Toy({"layers": 2}, num_hidden_layers=2, hidden_size=8)
    blocks = find_blocks(model)
    stream = torch.randn(1, 3, 8)
    assert torch.equal(blocks.entering((stream,), {}), stream)
    assert torch.equal(blocks.entering((), {"hidden_states": stream}), stream)
    assert torch.equal(blocks.leaving((stream, None)), stream)
    assert torch.equal(blocks.leaving(stream), stream)
