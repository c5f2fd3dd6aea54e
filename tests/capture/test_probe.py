"""One watched forward tells what the structure can't."""

import pytest
import torch

from layertap.capture.blocks import find_blocks
from layertap.capture.probe import probe
from layertap.errors import UnsupportedModelError
from layertap.testing import zoo

IDS = torch.arange(zoo.TOKEN_IDS.start, zoo.TOKEN_IDS.start + 12)[None]


def probed(name):
    model = zoo.build(name)
    return probe(find_blocks(model), lambda: model(**zoo.decoder_inputs(model, IDS), use_cache=False), IDS.shape[1])


@pytest.mark.parametrize("name", ["llama", "gptj", "openai-gpt", "t5", "gemma3n_text", "deepseek_v4", "zamba2"])
def test_a_plain_model_gives_no_notes(name):
    assert probed(name) == []


def test_a_block_that_does_not_run_on_text_is_noted():
    assert probed("mllama") == ["block 1 does not run on text alone: its layer is what enters the next block"]


def test_a_stream_that_is_changed_between_blocks_is_noted():
    assert probed("rwkv") == [
        "the stream is changed between blocks: what enters [2] is not what the block before put out"
    ]


@pytest.mark.parametrize(("name", "rows"), [("cpmant", 44), ("prophetnet", 36)])
def test_streams_without_a_row_for_each_token_are_refused(name, rows):
    with pytest.raises(UnsupportedModelError, match=f"{rows}.* rows for 1 sequence of 12 tokens"):
        probed(name)


def test_a_stack_that_runs_twice_is_refused():
    model = zoo.build("llama")

    def twice():
        model(IDS, use_cache=False)
        model(IDS, use_cache=False)

    with pytest.raises(UnsupportedModelError, match="don't run once each and in order"):
        probe(find_blocks(model), twice, IDS.shape[1])


def test_hooks_are_gone_after_a_failure():
    model = zoo.build("llama")
    blocks = find_blocks(model)

    def fails():
        raise RuntimeError("no forward")

    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(RuntimeError, match="no forward"):
        probe(blocks, fails, 12)
    assert before == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
