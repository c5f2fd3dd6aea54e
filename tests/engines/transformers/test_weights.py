"""Weights: only what is needed is read, a deeper call adds to it, and nothing is ever random."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from layertap.engines.transformers.load import open_model
from layertap.engines.transformers.weights import Placeholder, Weights
from layertap.errors import ModelError
from layertap.testing import zoo


def parameter_bytes(module):
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in module.parameters()}.values())


def sharded(name, folder):
    """A checkpoint with one shard for each few tensors, and the names of the shards by block."""
    target = folder / name
    zoo.build(name).save_pretrained(target, max_shard_size="40KB")
    return target


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "mamba2"])
def test_bytes_loaded_are_those_of_the_blocks_asked_for(name, tmp_path):
    weights = Weights(open_model(zoo.save(name, tmp_path)))
    model = weights.at_least(2)
    blocks = weights.layout.blocks_of(model)
    assert [isinstance(block, Placeholder) for block in blocks] == [False, False] + [True] * (weights.num_layers - 2)
    whole = zoo.build(name)
    left_out = weights.layout.blocks_of(whole)[2:]
    head = whole.get_output_embeddings()
    untied = head is not None and head.weight is not whole.get_input_embeddings().weight
    towers = {"gemma3": "model.vision_tower"}
    expected = parameter_bytes(whole) - sum(map(parameter_bytes, left_out)) - (parameter_bytes(head) if untied else 0)
    expected -= parameter_bytes(whole.get_submodule(towers[name])) if name in towers else 0
    assert parameter_bytes(model) == expected
    assert model.config.get_text_config().num_hidden_layers == weights.num_layers


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "zamba2"])
def test_a_deeper_call_ends_with_the_same_weights_as_a_whole_load(name, tmp_path):
    weights = Weights(open_model(zoo.save(name, tmp_path)))
    shallow = weights.at_least(1)
    first = next(weights.layout.blocks_of(shallow)[0].parameters())
    weights.at_least(2)
    deep = weights.at_least(weights.num_layers)
    truth = dict(zoo.build(name).named_parameters())
    for key, parameter in deep.named_parameters():
        assert torch.equal(parameter, truth[key]), key
    if name != "zamba2":  # its blocks share weights with one another, so it is read anew
        assert next(weights.layout.blocks_of(deep)[0].parameters()) is first
    assert weights.at_least(1) is deep


def test_complete_weights_have_a_head(tmp_path):
    weights = Weights(open_model(zoo.save("llama", tmp_path)))
    assert isinstance(weights.at_least(4).get_output_embeddings(), Placeholder)
    model = weights.at_least(0, complete=True)
    ids = torch.tensor([[9, 10, 11]])
    torch.testing.assert_close(model(ids).logits, zoo.build("llama")(ids).logits)


def deep_shards(folder, depth):
    """Shards that hold tensors of blocks from `depth` on, and nothing that is needed before."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    is_deep = {key: key.startswith("model.layers.") and int(key.split(".")[2]) >= depth for key in weight_map}
    needed = {shard for key, shard in weight_map.items() if not is_deep[key]}
    return sorted({shard for key, shard in weight_map.items() if is_deep[key]} - needed)


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_shard_that_only_deeper_blocks_need_is_not_read(tmp_path, damage):
    folder = sharded("llama", tmp_path)
    shards = deep_shards(folder, 2)
    assert shards
    for shard in shards:
        if damage == "missing":
            (folder / shard).unlink()
        else:
            (folder / shard).write_bytes(b"not tensors")
    weights = Weights(open_model(folder))
    model = weights.at_least(2)
    truth = dict(zoo.build("llama").named_parameters())
    assert all(torch.equal(p, truth[key]) for key, p in model.named_parameters())
    with pytest.raises(ModelError, match=rf"{shards[0]} is {damage}"):
        weights.at_least(4)
    assert weights.at_least(2) is model


def test_a_tensor_that_the_checkpoint_lacks_is_an_error_not_a_random_one(tmp_path):
    folder = zoo.save("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = Weights(open_model(folder))
    weights.at_least(1)
    with pytest.raises(
        ModelError, match=r"lacks 1 tensors that the model needs: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        weights.at_least(2)


def test_a_tensor_of_another_shape_is_an_error(tmp_path):
    folder = zoo.save("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="norm"):
        Weights(open_model(folder)).at_least(1)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0 nonsense", None])
def test_a_corrupt_weight_file_is_named(tmp_path, content):
    folder = zoo.save("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ModelError, match=r"model\.safetensors is corrupt"):
        Weights(open_model(folder)).at_least(1)


def test_a_pointer_of_git_lfs_is_told_from_a_corrupt_file(tmp_path):
    folder = zoo.save("llama", tmp_path)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"model\.safetensors only points to the weights.*git lfs pull"):
        Weights(open_model(folder)).at_least(1)


def test_a_folder_without_weights_is_an_error(tmp_path):
    folder = zoo.save("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="can't load the weights"):
        Weights(open_model(folder)).at_least(1)


def test_a_placeholder_refuses_to_run(tmp_path):
    model = Weights(open_model(zoo.save("llama", tmp_path))).at_least(1)
    with pytest.raises(AssertionError, match="LlamaDecoderLayer that isn't loaded was run"):
        model(torch.tensor([[9]]), use_cache=False)
