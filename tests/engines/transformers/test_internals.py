"""What is touched inside transformers: views, the check of its shape, and the packed runner."""

from __future__ import annotations

import pytest
import torch

from layertap.engines.transformers import internals
from layertap.engines.transformers.attention import private_view
from layertap.engines.transformers.internals import PagedRunner, _lists_places, set_attention
from layertap.errors import EngineError
from layertap.testing import zoo


def runner(model: torch.nn.Module) -> PagedRunner:
    return PagedRunner(model, num_pages=8, page_size=16, max_batch_tokens=16, max_requests=4)


def test_a_view_shares_every_weight_and_nothing_else():
    model = zoo.build("llama", attn_implementation="sdpa")
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("hook"))
    view = private_view(model)
    assert [id(p) for p in view.parameters()] == [id(p) for p in model.parameters()]
    set_attention(view, "eager")
    assert (view.config._attn_implementation, model.config._attn_implementation) == ("eager", "sdpa")
    assert view.model.layers[0].self_attn.config is view.config
    view(torch.tensor([[9, 10]]))
    assert calls == []
    model(torch.tensor([[9, 10]]))
    assert calls == ["hook"]


def test_a_changed_weight_shows_in_the_view():
    model = zoo.build("llama")
    view = private_view(model)
    ids = torch.tensor([[9, 10, 11]])
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
        torch.testing.assert_close(view(ids).logits, model(ids).logits)


def test_an_attribute_that_transformers_no_longer_has_is_an_error_that_names_it():
    found = runner(private_view(zoo.build("llama", attn_implementation="sdpa")))
    processor = found._processor

    class Newer:
        """The processor of a transformers that renamed a method."""

        def __getattr__(self, name: str) -> object:
            if name == "update_batch":
                raise AttributeError(name)
            return getattr(processor, name)

    with pytest.raises(EngineError, match=r"no Newer\.update_batch"):
        internals._check_shape(found._manager, Newer())


def test_making_a_runner_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    runner(private_view(zoo.build("llama", attn_implementation="sdpa")))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_prompt_longer_than_a_step_is_scheduled_in_chunks_with_their_positions():
    found = runner(private_view(zoo.build("llama", attn_implementation="sdpa")))
    found.add("long", list(range(20, 60)))
    chunks = []
    with torch.inference_mode():
        for _ in range(4):
            (part,) = found.schedule()
            chunks.append((part.start, part.count, part.samples))
            found.forward(lambda logits: logits.argmax(dim=-1).tolist())
    assert [start for start, _, _ in chunks] == [0, *(sum(c for _, c, _ in chunks[: i + 1]) for i in range(3))]
    assert sum(count for _, count, _ in chunks[:3]) == 40
    assert [samples for _, _, samples in chunks] == [False, False, True, True]
    found.remove("long")
    assert found.schedule() == []


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_places_in_the_cache_are_those_that_transformers_lists(name):
    model = private_view(zoo.build(name, attn_implementation="sdpa"))
    made = PagedRunner(model, num_pages=40, page_size=4, max_batch_tokens=16, max_requests=4)
    processor = made._processor
    if not _lists_places(processor):
        pytest.skip("transformers before 5.18 lists places in another way, and that is left to it")
    ios, allocators = processor.inputs_and_outputs, list(processor.cache.cache_allocators.values())
    for key, length in (("a", 3), ("b", 37), ("c", 8)):
        made.add(key, list(range(9, 9 + length)))
    num_reads = 0
    with torch.inference_mode():
        for step in range(24):
            scheduled = made.schedule()
            for number, allocator in enumerate(allocators):
                parts = [(part.key, part.start, part.count) for part in scheduled]
                writes = [place for part in parts for place in allocator.get_write_indices(*part)]
                assert ios.write_index_storage[number, : ios.true_write_sizes[number]].tolist() == writes
                if ios.max_kv_read:
                    reads = [place for part in parts for place in allocator.get_read_indices(*part)]
                    assert ios.read_index_storage[number, : ios.true_read_sizes[number]].tolist() == reads
                    num_reads += len(reads)
            made.forward(lambda logits: logits.argmax(-1).tolist())
            if step == 12:
                made.remove("a")
                made.add("d", [9, 10])
    assert num_reads > 500
