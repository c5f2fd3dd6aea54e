"""The generation loop: tokens and rows of requests that run together, and what happens to each when something goes wrong."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generating import TIMEOUT, Client, greedy, info_for, prompt_of, row_error
from torch import nn
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

from layertap.capture.request import Window
from layertap.engines.base import Delta
from layertap.engines.transformers.engine import TransformersEngine
from layertap.engines.transformers.generate import GenerationOptions, Generator
from layertap.errors import EngineError, OptionError, PromptError, UnsupportedModelError
from layertap.testing import oracle, zoo
from layertap.testing.tokenizer import byte_tokenizer

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", attn_implementation="sdpa")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def client(model: Any, tokenizer: Any) -> Iterator[Client]:
    """Chunks of 16 tokens, so that most prompts are fed in several."""
    info = info_for(model)
    generator = Generator(model, tokenizer, info, options=GenerationOptions(max_num_batched_tokens=16))
    assert generator.verdict.way == "batched", generator.verdict
    found = Client(generator, info)
    yield found
    generator.close()
    found.close()


def texts(tokenizer: Any, prompt: str) -> list[int]:
    found: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    return found


# What runs together


def test_short_and_chunked_prompts_together_give_the_tokens_and_rows_of_plain_forwards(client, model):
    answers = [client.ask(prompt_of(length, seed=length)) for length in (3, 50, 17, 1, 33)]
    for answer in answers:
        assert answer.token_ids == greedy(model, answer.prompt, 8)
        assert answer.last.finish_reason == "length"
        assert row_error(answer, model) < TOLERANCE


def test_equal_prompts_each_get_all_their_rows(client, model):
    prompt = prompt_of(40)
    for answer in [client.ask(prompt), client.ask(prompt, temperature=1.0, seed=1), client.ask([*prompt, 9])]:
        assert row_error(answer, model) < TOLERANCE


def test_a_cache_that_is_too_small_for_all_feeds_some_again_and_loses_no_row(model):
    info = info_for(model)
    bytes_per_token = 2 * info.num_layers * info.hidden_size * 4
    options = GenerationOptions(kv_cache_bytes=256 * bytes_per_token, max_num_seqs=6, max_num_batched_tokens=64)
    generator = Generator(model, None, info, options=options)
    client = Client(generator, info)
    gate = Gate()
    try:
        answers = [client.ask(prompt_of(40, seed=i), max_tokens=60, listener=gate) for i in range(6)]
        gate.opened.set()  # all are there
        for answer in answers:
            assert len(answer.token_ids) == 60
            assert row_error(answer, model) < TOLERANCE
            assert answer.token_ids == greedy(model, answer.prompt, 60)
        assert sum(int(answer.facts["replayed_rows"]) for answer in answers) > 0
    finally:
        generator.close()
        client.close()


def test_greedy_beside_sampled_and_a_seed_gives_the_same_tokens_in_any_company(client, model):
    prompt = prompt_of(12, seed=4)
    alone = client.ask(prompt, temperature=1.0, seed=11, max_tokens=20).token_ids
    beside = [client.ask(prompt_of(9, seed=i), temperature=0.9, max_tokens=20) for i in range(3)]
    again = client.ask(prompt, temperature=1.0, seed=11, max_tokens=20)
    other = client.ask(prompt, temperature=1.0, seed=12, max_tokens=20)
    greedy_one = client.ask(prompt, max_tokens=20)
    assert again.token_ids == alone
    assert other.token_ids != alone
    assert greedy_one.token_ids == greedy(model, prompt, 20)
    for answer in (*beside, again, other, greedy_one):
        assert row_error(answer, model) < TOLERANCE


def test_only_the_rows_of_the_window_are_taken(client, model):
    prompt = prompt_of(30, seed=2)
    expected = {
        Window(): slice(0, 30),
        Window(positions="last"): slice(29, 30),
        Window(positions="last", include_output=True): slice(36, 37),
        Window(positions="output", include_output=True): slice(30, 37),
        Window(positions=(5, 33), include_output=True): slice(5, 33),
    }
    answers = {window: client.ask(prompt, window=window) for window in expected}
    for window, answer in answers.items():
        assert row_error(answer, model, expected[window]) < TOLERANCE, window


def test_layers_keep_the_order_of_each_request(client, model):
    prompt = prompt_of(20, seed=3)
    answers = {layers: client.ask(prompt, layers=layers) for layers in ((4, 0), (2,), (1, 3, 0, 4, 2))}
    for layers, answer in answers.items():
        truth = oracle.hidden_states(model, answer.all_ids[:-1], layers)
        torch.testing.assert_close(answer.rows, truth, rtol=1e-4, atol=1e-4)


def test_more_requests_than_fit_at_once_all_end(client, model):
    answers = [client.ask(prompt_of(5, seed=i), max_tokens=3) for i in range(30)]
    assert [len(answer.token_ids) for answer in answers] == [3] * 30


# What ends a request


def test_the_end_of_sequence_token_ends_it_unless_it_is_ignored(model):
    prompt = prompt_of(10, seed=5)
    tokens = greedy(model, prompt, 8)
    first, second = tokens[2], tokens[4]
    assert first not in tokens[:2]
    info = info_for(model, eos_token_ids=(first, second))
    generator = Generator(model, None, info)
    client = Client(generator, info)
    try:
        ended = client.ask(prompt)
        assert (ended.token_ids, ended.last.finish_reason, ended.last.stop_reason) == (tokens[:3], "stop", None)
        assert row_error(ended, model) < TOLERANCE
        ignored = client.ask(prompt, ignore_eos=True)
        assert (ignored.token_ids, ignored.last.finish_reason) == (tokens, "length")
        held_back = client.ask(prompt, min_tokens=6)
        assert not {first, second} & set(held_back.token_ids[:6])
    finally:
        generator.close()
        client.close()


def test_a_stop_token_id_is_the_stop_reason(client, model):
    prompt = prompt_of(10, seed=5)
    tokens = greedy(model, prompt, 8)
    answer = client.ask(prompt, stop_token_ids=[tokens[3]])
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", tokens[3])
    assert answer.token_ids == tokens[: tokens.index(tokens[3]) + 1]


def test_a_stop_string_trims_the_text_and_keeps_the_tokens_and_their_rows(client, model, tokenizer):
    prompt = texts(tokenizer, "Once upon a time")
    whole = client.ask(prompt, max_tokens=12)
    stop = whole.text[3:5]
    answer = client.ask(prompt, max_tokens=12, stop=[stop, "never there"])
    cut = whole.text.index(stop)
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
    assert answer.text == whole.text[:cut]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert row_error(answer, model) < TOLERANCE
    kept = client.ask(prompt, max_tokens=12, stop=stop, include_stop_str_in_output=True)
    assert kept.text == whole.text[: cut + len(stop)]


def test_the_models_length_ends_it(model):
    info = info_for(model, max_model_len=20)
    generator = Generator(model, None, info)
    client = Client(generator, info)
    try:
        answer = client.ask(prompt_of(15), max_tokens=50)
        assert (len(answer.token_ids), answer.last.finish_reason) == (5, "length")
        assert row_error(answer, model) < TOLERANCE
    finally:
        generator.close()
        client.close()


def test_logprobs_are_those_of_plain_forwards(client, model):
    prompt = prompt_of(9, seed=8)
    answer = client.ask(prompt, temperature=1.0, seed=3, logprobs=2)
    with torch.no_grad():
        truth = model(torch.tensor([answer.all_ids])).logits[0].float().log_softmax(dim=-1)
    for i, delta in enumerate(answer.deltas):
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        assert entry.token_id == answer.token_ids[i]
        for token_id, (logprob, rank) in entry.entries.items():
            row = truth[len(prompt) - 1 + i]
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert rank == int((row > row[token_id]).sum()) + 1


# What goes wrong stays where it belongs


class Gate:
    """Holds the loop inside a callback until it is opened: requests are surely running, or surely waiting."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, _delta: Delta) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT)


def test_abort_ends_one_request_and_frees_its_place(client, model):
    gate = Gate()
    victim = client.ask(prompt_of(20), max_tokens=200, request_id="victim", listener=gate)
    other = client.ask(prompt_of(20, seed=1), max_tokens=30)
    assert gate.reached.wait(TIMEOUT)
    client.generator.abort("victim")
    client.generator.abort("nobody")
    gate.opened.set()
    assert victim.last.finish_reason == "abort"
    assert len(victim.token_ids) < 200
    assert victim.capture is not None
    with pytest.raises(EngineError, match="aborted"):
        victim.capture.result.result(TIMEOUT)
    assert row_error(other, model) < TOLERANCE
    again = client.ask(prompt_of(20), request_id="victim")
    assert row_error(again, model) < TOLERANCE


def test_a_waiting_request_can_be_aborted(model):
    info = info_for(model)
    generator = Generator(model, None, info, options=GenerationOptions(max_num_seqs=1))
    client = Client(generator, info)
    gate = Gate()
    try:
        client.ask(prompt_of(5), listener=gate)
        assert gate.reached.wait(TIMEOUT)
        waiting = client.ask(prompt_of(6), request_id="waiting")
        generator.abort("waiting")
        gate.opened.set()
        assert (waiting.last.finish_reason, waiting.token_ids) == ("abort", [])
    finally:
        gate.opened.set()
        generator.close()
        client.close()


def test_a_callback_that_raises_ends_its_own_request_only(client, model):
    def listener(_delta: Delta) -> None:
        raise KeyError("broken listener")

    broken = client.ask(prompt_of(20), max_tokens=50, listener=listener)
    other = client.ask(prompt_of(20, seed=1), max_tokens=20)
    assert row_error(other, model) < TOLERANCE
    assert broken.capture is not None
    with pytest.raises(EngineError, match="broken listener"):
        broken.capture.result.result(TIMEOUT)


BAD = [
    ([], {}, PromptError, "empty"),
    (prompt_of(256), {}, PromptError, "256 tokens"),
    ([5, 10**6], {}, PromptError, "1000000 is outside"),
    ([-1], {}, PromptError, "-1 is outside"),
    ([9], {"prompt_logprobs": 1}, OptionError, "prompt_logprobs"),
    ([9], {"logit_bias": {10**6: 1.0}}, OptionError, "logit_bias"),
    ([9], {"allowed_token_ids": [10**6]}, OptionError, "allowed_token_ids"),
]


@pytest.mark.parametrize(("prompt", "params", "error", "message"), BAD, ids=[case[3] for case in BAD])
def test_what_cannot_be_run_is_an_error_that_names_it(client, prompt, params, error, message):
    beside = client.ask(prompt_of(8))
    window = None if len(prompt) in (0, 256) else Window()
    answer = client.ask(prompt, window=window, **params)
    assert answer.last.finish_reason == "error"
    assert isinstance(answer.last.error, error)
    assert message in str(answer.last.error)
    if answer.capture is not None:
        with pytest.raises(error, match=message):
            answer.capture.result.result(TIMEOUT)
    assert beside.last.finish_reason == "length"


def test_a_request_larger_than_the_cache_is_refused_with_the_numbers(model):
    info = info_for(model, max_model_len=10_000)
    generator = Generator(model, None, info, options=GenerationOptions(kv_cache_bytes=1, max_num_batched_tokens=64))
    client = Client(generator, info)
    try:
        answer = client.ask(prompt_of(20), max_tokens=5000)
        assert isinstance(answer.last.error, EngineError)
        assert "may need 5020 tokens" in str(answer.last.error)
        assert client.ask(prompt_of(20)).last.finish_reason == "length"
    finally:
        generator.close()
        client.close()


def test_a_request_id_in_use_is_refused(client):
    gate = Gate()
    first = client.ask(prompt_of(4), request_id="twice", listener=gate)
    assert gate.reached.wait(TIMEOUT)
    try:
        with pytest.raises(OptionError, match="'twice' is in use"):
            client.ask(prompt_of(4), request_id="twice")
    finally:
        gate.opened.set()
    first.wait()
    assert client.ask(prompt_of(4), request_id="twice").last.finish_reason == "length"


class Fragile(nn.Module):
    """A block that can't stand one token: its forward raises when `poison` is among the embeddings."""

    def __init__(self, embedding: nn.Embedding, poison: int) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.poison = poison

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if bool((ids == self.poison).any()):
            raise RuntimeError("the device caught fire")
        return nn.functional.embedding(ids, self.weight)


def test_a_forward_that_raises_is_told_to_those_in_it_and_generation_goes_on():
    model = zoo.build("llama", attn_implementation="sdpa")
    model.set_input_embeddings(Fragile(model.get_input_embeddings(), poison=7))
    info = info_for(model)
    generator = Generator(model, None, info)
    client = Client(generator, info)
    try:
        client.ask([9, 10]).wait()
        cache = weakref.ref(generator._stepper._runner)
        poisoned = client.ask([9, 7, 10])
        assert isinstance(poisoned.last.error, EngineError)
        assert "caught fire" in str(poisoned.last.error)
        assert poisoned.capture is not None
        with pytest.raises(EngineError, match="caught fire"):
            poisoned.capture.result.result(TIMEOUT)
        healthy = client.ask(prompt_of(12))
        assert healthy.token_ids == greedy(model, healthy.prompt, 8)
        assert row_error(healthy, model) < TOLERANCE
        assert cache() is None, "the cache of the forward that failed is still there"
    finally:
        generator.close()
        client.close()


def test_a_model_that_is_not_causal_is_refused_with_the_reason():
    config = zoo.config("bert")
    config.is_decoder = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = zoo.model_class("bert")(config).float().eval()
    info = info_for(model)
    generator = Generator(model, None, info)
    client = Client(generator, info)
    try:
        answer = client.ask(prompt_of(6))
        assert isinstance(answer.last.error, UnsupportedModelError)
        assert "isn't causal" in str(answer.last.error)
    finally:
        generator.close()
        client.close()


# What the caller owns is left alone


def test_the_callers_global_generator_and_configuration_are_left_alone(model):
    torch.manual_seed(99)
    expected = torch.rand(4)
    torch.manual_seed(99)
    attention = model.config._attn_implementation
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    info = info_for(model)
    generator = Generator(model, None, info)
    client = Client(generator, info)
    client.ask(prompt_of(5), temperature=1.0).wait()
    assert torch.equal(torch.rand(4), expected)
    assert model.config._attn_implementation == attention
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    generator.close()
    client.close()


def test_close_ends_what_runs_and_what_waits_and_refuses_more(model):
    info = info_for(model)
    generator = Generator(model, None, info, options=GenerationOptions(max_num_seqs=1))
    client = Client(generator, info)
    gate = Gate()
    running = client.ask(prompt_of(5), max_tokens=200, listener=gate)
    assert gate.reached.wait(TIMEOUT)
    waiting = client.ask(prompt_of(6))
    closer = threading.Thread(target=generator.close)
    closer.start()
    while not generator._closed:
        closer.join(0.01)
    gate.opened.set()
    closer.join(TIMEOUT)
    for answer in (running, waiting):
        assert answer.last.finish_reason == "error"
        assert "closed" in str(answer.last.error)
        assert answer.capture is not None
        with pytest.raises(EngineError, match="closed"):
            answer.capture.result.result(TIMEOUT)
    with pytest.raises(EngineError, match="closed"):
        client.ask(prompt_of(5))
    client.close()


def test_submit_waits_while_the_queue_is_full(model):
    info = info_for(model)
    generator = Generator(model, None, info, options=GenerationOptions(max_num_seqs=1, max_waiting=1))
    client = Client(generator, info)
    gate = Gate()
    order = []
    try:
        first = client.ask(prompt_of(5), listener=gate)
        assert gate.reached.wait(TIMEOUT)
        second = client.ask(prompt_of(6), listener=lambda d: d.finish_reason and order.append("second ended"))
        third: list[Any] = []

        def submit() -> None:
            third.append(client.ask(prompt_of(7)))
            order.append("third submitted")

        thread = threading.Thread(target=submit)
        thread.start()
        gate.opened.set()
        thread.join(TIMEOUT)
        assert [first.last.finish_reason, second.last.finish_reason, third[0].last.finish_reason] == ["length"] * 3
        assert "third submitted" in order
    finally:
        gate.opened.set()
        generator.close()
        client.close()


# One at a time


@pytest.mark.parametrize("name", ["mpt", "mamba2", "recurrent_gemma"])
def test_models_that_cannot_be_batched_take_turns(name):
    model = zoo.build(name)
    info = info_for(model, num_layers=len(oracle.find_blocks(model).blocks), hidden_size=64, max_model_len=64)
    generator = Generator(model, None, info)
    client = Client(generator, info)
    try:
        assert generator.verdict.way != "batched"
        answers = [client.ask(prompt_of(length, seed=length), max_tokens=6) for length in (20, 3, 9, 14, 2)]
        for answer in answers:
            assert answer.token_ids == greedy(model, answer.prompt, 6)
            assert row_error(answer, model) < TOLERANCE
        turns = [client.ask(prompt_of(4, seed=i), max_tokens=40, request_id=f"turn-{i}") for i in range(2)]
        generator.abort("turn-0")
        assert turns[1].token_ids == greedy(model, turns[1].prompt, 40)
        assert turns[0].last.finish_reason in ("abort", "length")
    finally:
        generator.close()
        client.close()


# Beside extraction


def test_extraction_beside_generation_gives_the_rows_of_each(tmp_path):
    engine = TransformersEngine(zoo.save("llama", tmp_path), max_model_len=128)
    model = zoo.build("llama")
    client = Client(engine, engine.info)
    try:
        answers = [client.ask(prompt_of(20, seed=i), max_tokens=60, temperature=1.0, seed=i) for i in range(6)]
        captures = [extract_capture(client, i) for i in range(20)]
        done = sorted(engine.extract([job for job, _ in captures]))
        assert done == list(range(20))
        for answer in answers:
            assert row_error(answer, model) < TOLERANCE
        for job, capture in captures:
            truth = oracle.hidden_states(model, job.token_ids)
            rows = torch.from_numpy(capture.result.result(TIMEOUT).rows.view("float32").copy())
            torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)
    finally:
        engine.close()
        client.close()


_numbers = itertools.count()


def extract_capture(client: Client, index: int) -> tuple[Any, Any]:
    from layertap.capture.request import CaptureSpec
    from layertap.engines.base import ExtractJob

    prompt = prompt_of(5 + 3 * index, seed=100 + index)
    spec = CaptureSpec(
        layers=tuple(range(client.info.num_layers + 1)),
        dtype="float32",
        hidden_size=client.info.hidden_size,
        prompt_len=len(prompt),
    )
    capture = client.recorder.admit(spec, request_id=f"extract-{next(_numbers)}", path=None)
    return ExtractJob(index=index, token_ids=prompt, capture=capture), capture


def test_a_cache_that_transformers_finds_too_large_is_made_smaller(model, monkeypatch):
    """It counts a mask of all queries over all of the cache, made or not: small models on large devices have no room."""
    monkeypatch.setattr(PagedAttentionMemoryHandler, "get_available_memory", lambda _: 6 * 2**20)
    generator = Generator(model, None, info_for(model), options=GenerationOptions(kv_cache_bytes=2**30))
    client = Client(generator, info_for(model))
    try:
        answer = client.ask(prompt_of(12))
        assert answer.token_ids == greedy(model, answer.prompt, 8)
        assert generator._stepper.capacity < 8 * 256
    finally:
        generator.close()
        client.close()
