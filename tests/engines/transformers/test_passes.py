"""One forward by each way, and blocks that torch.compile takes whole."""

import pytest
import torch
from extraction_cases import random_prompts

from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.weights import Layout
from layertap.testing import oracle, zoo


def run(passes, way, prompts, layers):
    lengths = [len(prompt) for prompt in prompts]
    rows = torch.full((sum(lengths), len(layers), passes.layout.hidden_size), float("nan"))
    passes.run(way, prompts, [range(length) for length in lengths], layers, rows)
    return rows.split(lengths)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "gpt2"])
def test_compiled_blocks_have_no_graph_break_and_take_any_length(name):
    model = zoo.build(name)
    passes = Passes(model, Layout(model))
    passes.compile_packed(backend="aot_eager", fullgraph=True)
    for lengths in ([5, 11], [3, 30, 1], [24]):
        prompts = random_prompts(lengths)
        for prompt, rows in zip(prompts, run(passes, "packed", prompts, [0, 2, 4]), strict=True):
            torch.testing.assert_close(rows, oracle.hidden_states(model, prompt, [0, 2, 4]), atol=1e-4, rtol=1e-4)


def test_the_model_stays_as_it_was():
    model = zoo.build("llama", attn_implementation="sdpa")
    passes = Passes(model, Layout(model))
    run(passes, "packed", random_prompts([3, 4]), [4])
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_right_padding_does_not_reach_the_rows():
    model = zoo.build("llama")
    passes = Passes(model, Layout(model))
    prompts = random_prompts([4, 31, 9])
    for prompt, rows in zip(prompts, run(passes, "padded", prompts, [1, 4]), strict=True):
        torch.testing.assert_close(rows, oracle.hidden_states(model, prompt, [1, 4]), atol=1e-4, rtol=1e-4)
