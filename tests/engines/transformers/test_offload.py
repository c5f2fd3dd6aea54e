"""Blocks in host memory: the same rows bit for bit, early exit, deeper calls, and what is refused."""

import gc
import itertools
import logging
import weakref

import pytest
import torch
from extraction_cases import engine, extract, random_prompts
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layertap.engines.transformers import offload
from layertap.engines.transformers.load import open_model
from layertap.engines.transformers.offload import SLOTS, Streamer, flat_bytes, spread
from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.weights import Placeholder, Weights
from layertap.errors import ModelError, OptionError
from layertap.testing import oracle, zoo

LENGTHS = [5, 17, 40, 3, 9]


def tight(weights, blocks_more=0):
    """The least memory with which a model runs, and room for some blocks."""
    return (weights.other_bytes + (SLOTS + blocks_more) * max(weights.block_bytes) + 64) * 16 // 15 + 64


@pytest.mark.parametrize(
    ("name", "resident"), [("llama", 0), ("gpt2", 0), ("gemma3", 1), ("mixtral", 0), ("mamba2", 0)]
)
def test_streamed_blocks_give_the_rows_of_resident_ones_bit_for_bit(name, resident, tmp_path):
    own = engine(name, tmp_path / "own")
    layers = [own.info.num_layers, 0, 2]
    prompts = random_prompts(LENGTHS)
    streamed = engine(name, tmp_path / "streamed", max_memory=tight(own.weights, resident))
    for _ in range(2):
        rows = extract(streamed, prompts, layers)
        assert all(torch.equal(a, b) for a, b in zip(extract(own, prompts, layers), rows, strict=True))
    assert own.weights.streamer is None
    assert own.plan is None
    assert streamed.weights.streamer.streamed == own.info.num_layers - resident
    assert streamed.plan.resident == resident


def test_early_exit_loads_no_block_past_the_deepest_layer_and_a_deeper_call_does(tmp_path):
    zoo.save("gemma3", tmp_path)
    room = tight(Weights(open_model(tmp_path / "gemma3")))
    streamed = engine("gemma3", tmp_path, max_memory=room)
    truth = zoo.build("gemma3")
    (prompt,) = random_prompts([12])
    for depth in (4, 1, 6):
        (rows,) = extract(streamed, [prompt], [depth])
        torch.testing.assert_close(rows, oracle.hidden_states(truth, prompt, [depth]), atol=1e-4, rtol=1e-4)
        blocks = streamed.weights.layout.blocks_of(streamed.weights.at_least(depth))
        loaded = max(depth, 4)
        assert [isinstance(block, Placeholder) for block in blocks] == [False] * loaded + [True] * (6 - loaded)
        assert streamed.weights.streamer.streamed == loaded


def test_a_call_whose_blocks_fit_keeps_them_on_the_device_until_a_deeper_one_comes(tmp_path):
    weights = Weights(open_model(zoo.save("gemma3", tmp_path)))
    weights = Weights(weights.source, room=tight(weights))
    shallow = weights.at_least(1)
    assert weights.streamer is None
    gone = weakref.ref(shallow)
    del shallow
    weights.at_least(6)
    gc.collect()
    assert weights.streamer.streamed == 6
    assert gone() is None


def test_what_device_memory_holds_is_the_slots_and_the_rest(tmp_path):
    weights = Weights(open_model(zoo.save("gemma3", tmp_path)))
    weights = Weights(weights.source, room=tight(weights))
    model = weights.at_least(6)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) <= weights.other_bytes + SLOTS * max(weights.block_bytes)
    weights.streamer.arrange(spread(2, 6))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) <= weights.other_bytes + (SLOTS + 2) * max(weights.block_bytes)
    assert weights.streamer.streamed == 4


def compilations(weights, truth):
    """How often blocks were compiled for forwards of three lengths, whose rows are right."""
    from torch._dynamo.testing import CompileCounterWithBackend

    passes = Passes(weights.at_least(4), weights.layout)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    passes.compile_packed(backend=counter, fullgraph=True)
    for lengths in ([5, 11], [3, 30, 1], [70]):
        prompts = random_prompts(lengths)
        rows = torch.empty(sum(lengths), 2, passes.layout.hidden_size)
        passes.run("packed", prompts, [range(length) for length in lengths], [2, 4], rows)
        for prompt, part in zip(prompts, rows.split(lengths), strict=True):
            torch.testing.assert_close(part, oracle.hidden_states(truth, prompt, [2, 4]), atol=1e-4, rtol=1e-4)
    return counter.frame_count


def test_streamed_blocks_share_compiled_code_as_resident_ones_do(tmp_path):
    resident = Weights(open_model(zoo.save("llama", tmp_path)))
    streamed = Weights(resident.source, room=tight(resident))
    truth = zoo.build("llama")
    assert compilations(streamed, truth) == compilations(resident, truth) <= 2
    assert streamed.streamer.streamed == 4


def test_generation_is_refused_with_the_reason(tmp_path):
    room = tight(Weights(open_model(zoo.save("llama", tmp_path))))
    streamed = engine("llama", tmp_path, max_memory=room)
    with pytest.raises(ModelError, match="generation needs all weights on the device"):
        _ = streamed.generator
    assert isinstance(extract(streamed, random_prompts([4]), [4])[0], torch.Tensor)


def test_too_little_memory_for_a_few_blocks_is_said(tmp_path):
    with pytest.raises(ModelError, match="device memory are too little: embeddings and the like take"):
        extract(engine("llama", tmp_path, max_memory=1000), random_prompts([4]), [4])


@pytest.mark.parametrize("value", ["much", "-1GiB", 0, True, "3 XB"])
def test_a_size_that_is_none_is_refused(value, tmp_path):
    with pytest.raises(OptionError, match=r"max_memory: expected a size such as '24GiB'"):
        engine("llama", tmp_path, max_memory=value)


def test_models_whose_blocks_share_weights_are_not_streamed_and_it_is_said(tmp_path, caplog):
    weights = Weights(open_model(zoo.save("zamba2", tmp_path)), room=1)
    with caplog.at_level(logging.WARNING):
        weights.at_least(1)
    assert weights.streamer is None
    assert "its blocks share weights with one another" in caplog.text


def test_dummy_weights_are_the_same_resident_and_streamed_and_differ_from_block_to_block(tmp_path):
    folder = tmp_path / "bare"
    zoo.config("llama").save_pretrained(folder)
    source = open_model(folder, dtype="float32")
    whole = Weights(source, dummy=True)
    (prompt,) = random_prompts([12])
    rows = []
    for weights in (whole, Weights(source, room=tight(whole), dummy=True)):
        model = weights.at_least(4)
        first, second = (list(block.parameters()) for block in weights.layout.blocks_of(model)[:2])
        passes = Passes(model, weights.layout)
        got = torch.empty(12, 2, 64)
        passes.run("alone", [prompt], [range(12)], [1, 4], got)
        assert torch.isfinite(got).all()
        assert float(got.std()) > 0
        rows.append(got)
        if weights is whole:
            assert not torch.equal(first[0], second[0])
    assert torch.equal(*rows)


def test_a_block_with_other_than_plain_tensors_is_refused():
    class Odd(torch.Tensor):
        pass

    block = nn.Linear(2, 2)
    block.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Odd), requires_grad=False)
    with pytest.raises(ModelError, match="weight of block 0 is a Odd"):
        Streamer(torch.device("cpu"), 1024).adopt(0, block)


@given(total=st.integers(1, 90), data=st.data())
def test_resident_blocks_are_spread_evenly(total, data):
    count = data.draw(st.integers(0, total))
    chosen = sorted(spread(count, total))
    assert len(chosen) == count
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_flat_bytes_counts_floating_point_in_the_dtype_that_it_will_have():
    block = nn.Linear(3, 5)
    block.register_parameter("ids", nn.Parameter(torch.ones(7, dtype=torch.int64), requires_grad=False))
    assert flat_bytes(block.parameters(), torch.bfloat16) == 3 * 256
    assert flat_bytes(nn.Linear(64, 64, bias=False).parameters(), torch.bfloat16) == 64 * 64 * 2


def test_host_memory_that_cannot_be_pinned_is_asked_of_torch_and_then_refused(monkeypatch):
    def none(num_bytes):
        raise torch.OutOfMemoryError(f"{num_bytes} bytes can't be pinned")

    asked = []

    def empty(*size, **options):
        asked.append((size, options.get("pin_memory")))
        raise RuntimeError("nor by torch")

    monkeypatch.setattr(offload, "pinned_bytes", none)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        with pytest.raises(ModelError, match="12345 bytes of host memory can't be had for weights .*nor by torch"):
            offload._host_buffer(12_345, pinned=True)
    assert asked == [((12_345,), True)]
