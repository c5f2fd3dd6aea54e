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


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_on_the_cpu_a_row_has_the_same_bits_whatever_it_is_packed_with(name):
    model = zoo.build(name)
    passes = Passes(model, Layout(model))
    lengths = [5, 17, 1, 40, 2, 23, 3, 64]
    prompts = random_prompts(lengths)
    whole = run(passes, "packed", prompts, [0, 2, 4])
    # every total of rows, odd and even, also fewer than a vector holds
    for chosen in ([0], [2], [4], [6, 2], [7, 1, 0], [3, 5], [1, 2, 3, 4], list(range(7, -1, -1))):
        for place, rows in zip(chosen, run(passes, "packed", [prompts[i] for i in chosen], [0, 2, 4]), strict=True):
            assert torch.equal(rows, whole[place])
