"""The oracle agrees with transformers' own hidden states wherever these are defined."""

import pytest
import torch

from layertap.capture.blocks import find_blocks
from layertap.errors import UnsupportedModelError
from layertap.testing import oracle, zoo

IDS = list(range(zoo.TOKEN_IDS.start, zoo.TOKEN_IDS.start + 24))
AFTER_THE_BLOCK = ("mamba", "mamba2", "falcon_mamba", "rwkv")
"""Families whose transformers entries are block outputs: entry L is what leaves block L."""
NO_ROWS = {"cpmant": "for 24 tokens", "prophetnet": "for 24 tokens", "dory": "block 2 ran twice"}
"""Models without one row for each token and layer, and what the oracle says of them."""


def found(model):
    try:
        return find_blocks(model)
    except UnsupportedModelError:
        return None


def own_hidden_states(model):
    with torch.no_grad():
        output = model(**zoo.decoder_inputs(model, torch.tensor([IDS])), use_cache=False, output_hidden_states=True)
    states = getattr(output, "decoder_hidden_states", None)
    return output.hidden_states if states is None else states


def last_norms(model, blocks):
    """Inputs and outputs of all norms outside of the blocks, in the order in which they run."""
    inner = {id(module) for block in blocks.blocks for module in block.modules()}
    seen = []
    hooks = [
        module.register_forward_hook(lambda _module, args, output: seen.append((args[0], output)))
        for module in model.modules()
        if "Norm" in type(module).__name__ and not list(module.children()) and id(module) not in inner
    ]
    own_hidden_states(model)
    for hook in hooks:
        hook.remove()
    return seen


def test_every_layer_is_what_transformers_gives_and_the_last_one_is_not_normed(case_name, model):
    blocks = found(model)
    if blocks is None or blocks.residual.kind != "single" or case_name in NO_ROWS:
        assert blocks is None or blocks.residual.kind != "single" or case_name in NO_ROWS
        return
    rows = oracle.hidden_states(model, IDS)
    own = own_hidden_states(model)
    assert rows.shape == (24, blocks.num_layers + 1, blocks.hidden_size)
    if case_name == "mllama":  # transformers leaves out the block that doesn't run
        rows = rows[:, [0, 2, 3, 4]]
    shift = 1 if case_name in AFTER_THE_BLOCK else 0
    for layer in range(shift, rows.shape[1] - 1):
        if case_name == "rwkv" and layer == 2:
            continue  # transformers records the stream before it halves it
        torch.testing.assert_close(rows[:, layer], own[layer - shift][0], rtol=1e-5, atol=1e-5)
    scale = 0.5 if case_name == "rwkv" else 1.0  # halved once more behind the last block
    normed = [output for read, output in last_norms(model, blocks) if torch.equal(read[0], rows[:, -1] * scale)]
    assert len(own) == rows.shape[1]
    if normed and own[-1].shape == normed[-1].shape:
        torch.testing.assert_close(normed[-1], own[-1], rtol=1e-5, atol=1e-5)
    else:  # no final norm, or a projection behind it
        assert case_name == "opt-post-norm" or torch.equal(own[-1][0], rows[:, -1])


def test_layers_differ_measurably(case_name, model):
    if found(model) is None or case_name in NO_ROWS:
        return
    rows = oracle.hidden_states(model, IDS)
    changes = [(rows[:, i + 1] - rows[:, i]).norm() / rows[:, i].norm() for i in range(rows.shape[1] - 1)]
    skipped = [1] if case_name == "mllama" else []
    assert all(change > 0.02 or layer in skipped for layer, change in enumerate(changes)), changes
    assert torch.isfinite(rows).all()


def test_the_oracle_leaves_the_model_as_it_was():
    model = zoo.build("gemma3", attn_implementation="sdpa")
    before = own_hidden_states(model)[3]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    oracle.hidden_states(model, IDS)
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "sdpa"
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert torch.equal(own_hidden_states(model)[3], before)


def test_layers_come_in_the_order_asked_for():
    model = zoo.build("llama")
    rows = oracle.hidden_states(model, IDS)
    assert torch.equal(oracle.hidden_states(model, IDS, [4, 0, 2]), rows[:, [4, 0, 2]])


def test_a_model_of_another_precision_is_refused():
    with pytest.raises(ValueError, match="float32 model in eval mode"):
        oracle.hidden_states(zoo.build("llama").to(torch.bfloat16), IDS)
    with pytest.raises(ValueError, match="training=True"):
        oracle.hidden_states(zoo.build("llama").train(), IDS)


@pytest.mark.parametrize("name", [name for name in NO_ROWS if name in zoo.CASES])
def test_a_stream_without_a_row_for_each_token_is_refused(name):
    with pytest.raises(ValueError, match=NO_ROWS[name]):
        oracle.hidden_states(zoo.build(name), IDS)
