"""Requests of every kind at once, by the official client; shared by the tests of both engines."""

import asyncio
import random

import openai

KINDS = ("whole", "stream", "several", "stop", "abort", "closed", "chat")
GIVEN_UP = ("abort", "closed")


async def run_all(url, count, *, api_key="none", most=150, seeded=True):
    """Send them; returns (kind, [(handle, tokens), ...]) of each. `most` is how long those want to be that are given up;
    with `seeded` each request has a seed (vLLM's sampler on the CPU dies of them: "CPU Generator does not use offset").
    """
    rng = random.Random(0)
    jobs = [(rng.choice(KINDS), rng.randrange(1 << 30)) for _ in range(count)]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=800) as client:
        return await asyncio.gather(*(one(client, kind, seed, most, seeded) for kind, seed in jobs))


async def one(client, kind, seed, most, seeded):
    rng = random.Random(seed)
    prompt = [rng.randrange(8, 264) for _ in range(rng.randrange(1, 40))]
    body = {
        "model": "tiny",
        "max_tokens": rng.randrange(1, 12),
        "seed": seed if seeded else None,
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
        return kind, await give_up(client, prompt, body | {"max_tokens": most}, rng)
    if kind in ("stream", "closed"):
        return kind, await read_stream(
            client, prompt, body | ({"max_tokens": most} if kind == "closed" else {}), kind == "closed"
        )
    answer = await client.completions.create(prompt=prompt, **body)
    return kind, [(c.kv_transfer_params, c.prompt_token_ids + c.token_ids) for c in answer.choices]


async def give_up(client, prompt, body, rng):
    try:
        await asyncio.wait_for(client.completions.create(prompt=prompt, **body), rng.random())
    except TimeoutError:
        return []
    return []


async def read_stream(client, prompt, body, close_early):
    tokens = list(prompt)
    stream = await client.completions.create(prompt=prompt, stream=True, **body)
    async with stream:
        async for chunk in stream:
            (choice,) = chunk.choices
            tokens += choice.token_ids
            if close_early and len(tokens) > len(prompt) + 2:
                return []
            if choice.finish_reason is not None:
                return [(choice.kv_transfer_params, tokens)]
    raise AssertionError("a stream ended without a finish reason")
