"""The front doors when things go wrong: early ends, cancelled consumers, bad prompts, and requests that owe no rows."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from layertap import LLM, AsyncLLM, LayerError, PromptError, SamplingParams, load_hidden_states
from layertap.assembly import Assembly
from layertap.engines.transformers.budget import ARENAS
from layertap.testing import zoo

PROMPT = [9, 10, 11, 12]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llm(checkpoint, tmp_path):
    with LLM(checkpoint, layers=[1, 3], storage=tmp_path) as made:
        yield made


def params(max_tokens=4, **transfer):
    return {"max_tokens": max_tokens, "temperature": 0.0, "extra_args": {"kv_transfer_params": transfer}}


def test_a_bad_layer_is_refused_when_extract_is_called_not_when_it_is_iterated(llm):
    with pytest.raises(LayerError, match="layer 99"):
        llm.extract([PROMPT], layers=[99])


def test_a_request_that_owes_no_rows_gives_an_empty_file_that_loads(llm):
    (output,) = llm.generate([PROMPT], params(1, positions="output"))
    loaded = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    assert loaded["hidden_states"].shape == (0, 2, llm.info.hidden_size)
    assert loaded["token_ids"].tolist() == []


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1.5, 2.5]),
        np.array([1.0, 2.0]),
        torch.tensor([[9, 10]]),
        np.array([True, False]),
        torch.tensor([True]),
        [9, None],
        [9, 10.0],
    ],
)
def test_token_ids_are_never_rounded(llm, ids):
    with pytest.raises(PromptError, match=r"prompt_token_ids\[\d\]: expected a token id"):
        llm.generate([{"prompt_token_ids": ids}])


def test_integers_of_numpy_and_torch_are_token_ids(llm):
    for ids in (np.array(PROMPT, np.uint16), torch.tensor(PROMPT, dtype=torch.int32)):
        (output,) = llm.generate([{"prompt_token_ids": ids}], params())
        assert output.prompt_token_ids == PROMPT


def test_ctrl_c_in_generate_ends_what_runs_and_the_next_call_works(llm, tmp_path):
    started, real = threading.Event(), llm._front.start

    def interrupted(*args):
        if started.is_set():
            raise KeyboardInterrupt
        started.set()
        return real(*args)

    llm._front.start = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT], params(200, include_output_tokens=True))
    llm._front.start = real
    (output,) = llm.generate([PROMPT], params())
    assert output.finished
    assert llm._front.num_running == 0


def test_ctrl_c_while_extract_hands_over_does_not_block_the_next_call(llm, monkeypatch):
    def interrupted(_assembly, _rows):
        raise KeyboardInterrupt

    for _ in range(ARENAS + 1):
        monkeypatch.setattr(Assembly, "accept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(llm.extract([PROMPT, PROMPT]))
        monkeypatch.undo()
    assert len(list(llm.extract([PROMPT, PROMPT]))) == 2


def test_an_output_that_was_yielded_does_not_grow(checkpoint):
    llm = AsyncLLM(checkpoint)

    async def main():
        outputs = [
            output async for output in llm.generate(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
        ]
        first, last = outputs[0].outputs[0], outputs[-1].outputs[0]
        assert len(last.token_ids) == len(last.logprobs) == 6
        for output in outputs:
            (choice,) = output.outputs
            assert len(choice.token_ids) == len(choice.logprobs)
            assert list(last.token_ids[: len(choice.token_ids)]) == list(choice.token_ids)
        assert first is last or len(first.token_ids) < 6

    asyncio.run(main())
    llm.close()


def test_a_consumer_cancelled_during_admission_leaves_nothing_running(checkpoint, tmp_path):
    llm = AsyncLLM(checkpoint, layers=[1], storage=tmp_path)
    entered, go_on, real = threading.Event(), threading.Event(), llm.front.start

    def slow(*args):
        entered.set()
        assert go_on.wait(60)
        return real(*args)

    llm.front.start = slow

    async def consume():
        async for _ in llm.generate(PROMPT, params(200, include_output_tokens=True), "left"):
            pass

    async def main():
        task = asyncio.create_task(consume())
        await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())
    with pytest.raises(Exception, match="aborted"):
        load_hidden_states(tmp_path / "left.safetensors", timeout=60)
    llm.close()
    assert llm.front.num_running == 0


def test_a_consumer_cancelled_while_extract_computes_stops_it_quietly(checkpoint, tmp_path):
    llm = AsyncLLM(checkpoint, layers=[1], storage=tmp_path)
    pulled, go_on = threading.Event(), threading.Event()

    def prompts():
        yield PROMPT
        pulled.set()
        assert go_on.wait(60)
        while True:
            yield PROMPT

    async def main():
        async def consume():
            async for _ in llm.extract(prompts()):
                pass

        task = asyncio.create_task(consume())
        await asyncio.to_thread(pulled.wait, 60)
        task.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    llm.close()
    assert llm.front.recorder.budget.in_flight_bytes == 0


def test_two_runs_of_the_same_prompts_give_the_same_bytes(checkpoint):
    runs = []
    for _ in range(2):
        with LLM(checkpoint, layers=[1, 4]) as llm:
            samples = llm.extract([PROMPT, [20, 21], [30] * 40])  # they come as they finish
            runs.append({sample.index: sample.hidden_states for sample in samples})
    first, second = runs
    assert [torch.equal(first[index], second[index]) for index in range(3)] == [True] * 3
