"""500 requests of every kind at once: each one's rows are the oracle's, and what was given up leaves nothing behind."""

import asyncio
import random
import threading

import openai
import pytest

from layertap import load_hidden_states

COUNT = 500
KINDS = ("whole", "stream", "several", "stop", "abort", "closed", "chat")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_500_concurrent_mixed_requests_equal_the_oracle(server, storage, check_rows):
    outcomes = asyncio.run(run_all(server.url))
    assert len(outcomes) == COUNT
    checked = 0
    for kind, answers in outcomes:
        for handle, tokens in answers:
            check_rows(load_hidden_states(handle["hidden_states_path"], timeout=60), tokens[:-1])
            checked += 1
        assert answers or kind in ("abort", "closed")
    assert checked > COUNT / 2
    front = server.state.front
    wait_until(lambda: front.num_running == 0 and server.state.book.num_writing == 0 and server.state.num_running == 0)
    assert front.recorder.budget.in_flight_bytes == 0
    assert front.recorder.room.reserved_bytes == 0
    assert not [path for path in storage.iterdir() if path.name.endswith(".layertap-tmp")]


def wait_until(condition):
    """Poll on an event that nobody sets: the state is another thread's."""
    nothing = threading.Event()
    for _ in range(3000):
        if condition():
            return
        nothing.wait(0.02)
    raise AssertionError("what was given up still runs")


async def run_all(url):
    rng = random.Random(0)
    jobs = [(rng.choice(KINDS), rng.randrange(1 << 30)) for _ in range(COUNT)]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=800) as client:
        return await asyncio.gather(*(one(client, kind, seed) for kind, seed in jobs))


async def one(client, kind, seed):
    rng = random.Random(seed)
    prompt = [rng.randrange(8, 264) for _ in range(rng.randrange(1, 40))]
    body = {
        "model": "tiny",
        "max_tokens": rng.randrange(1, 12),
        "seed": seed,
        "extra_body": {
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": True},
        },
    }
    if kind == "chat":
        messages = [{"role": "user", "content": "".join(rng.choices("abcdef ", k=10))}]
        answer = await client.chat.completions.create(messages=messages, **body)
        return kind, [(c.kv_transfer_params, answer.prompt_token_ids + c.token_ids) for c in answer.choices]
    if kind == "several":
        answer = await client.completions.create(prompt=[prompt, prompt[::-1]], n=2, **body)
        return kind, [(c.kv_transfer_params, c.prompt_token_ids + c.token_ids) for c in answer.choices]
    if kind == "stop":
        body |= {"max_tokens": 30, "stop": ["e", "a", " ", "1"]}
    if kind == "abort":
        return kind, await give_up(client, prompt, body, rng)
    if kind in ("stream", "closed"):
        return kind, await read_stream(client, prompt, body, close_early=kind == "closed")
    answer = await client.completions.create(prompt=prompt, **body)
    return kind, [(c.kv_transfer_params, c.prompt_token_ids + c.token_ids) for c in answer.choices]


async def give_up(client, prompt, body, rng):
    try:
        await asyncio.wait_for(client.completions.create(prompt=prompt, **body | {"max_tokens": 150}), rng.random())
    except TimeoutError:
        return []
    return []


async def read_stream(client, prompt, body, *, close_early):
    tokens = list(prompt)
    stream = await client.completions.create(
        prompt=prompt, stream=True, **body | ({"max_tokens": 150} if close_early else {})
    )
    async with stream:
        async for chunk in stream:
            (choice,) = chunk.choices
            tokens += choice.token_ids
            if close_early and len(tokens) > len(prompt) + 2:
                return []
            if choice.finish_reason is not None:
                return [(choice.kv_transfer_params, tokens)]
    raise AssertionError("a stream ended without a finish reason")
