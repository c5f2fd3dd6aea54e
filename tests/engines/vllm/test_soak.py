"""Two thousand requests of random shapes through one small engine, with preemption, prefix hits and aborts: no mix-up, no leak."""

import gc
import os
import random
from pathlib import Path

import checkpoints
import pytest
import running

from layertap import load_hidden_states
from layertap.errors import HiddenStatesError
from layertap.testing import oracle

NUM_REQUESTS = 2000


@pytest.fixture(scope="module", params=["thread", "process"])
def engine(request, checkpoint_folder, tmp_path_factory):
    checkpoint = checkpoints.save("llama", checkpoint_folder)
    storage = tmp_path_factory.mktemp("states")
    os.environ["LAYERTAP_VLLM_WRITER"] = request.param
    try:
        with running.running(checkpoint, storage, block_size=32, num_gpu_blocks_override=10) as llm:
            yield llm.llm_engine, running.load_oracle("llama", checkpoint), storage
    finally:
        del os.environ["LAYERTAP_VLLM_WRITER"]


def random_request(rng, words):
    length = rng.choice([2, 7, 20, 35, 64, 65, 90])
    prompt = (rng.choice(words) * 20)[:length] if rng.random() < 0.4 else [rng.randrange(8, 264) for _ in range(length)]
    layers = rng.sample(range(5), rng.randint(1, 5))
    options = {"layers": layers}
    kind = rng.choice(["prompt", "all", "last", "output", "span"])
    if kind in {"all", "output"}:
        options["include_output_tokens"] = True
    if kind in {"last", "output"}:
        options["positions"] = kind
    if kind == "span":
        end = rng.randint(1, length)
        options["positions"] = [rng.randrange(end), end]
    return prompt, kind, options


def expected_rows(kind, options, prompt_len, num_tokens):
    end = num_tokens - 1 if options.get("include_output_tokens") else prompt_len
    if kind == "last":
        return slice(end - 1, end)
    if kind == "output":
        return slice(prompt_len, end)
    return slice(*options["positions"]) if kind == "span" else slice(0, end)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_thousand_requests_keep_their_own_rows_and_leave_nothing_behind(engine):
    core, model, storage = engine
    rng = random.Random(11)
    words = [[rng.randrange(8, 264) for _ in range(9)] for _ in range(5)]
    asked, waiting, aborted, checked = {}, [], set(), 0
    descriptors = None
    for index in range(NUM_REQUESTS):
        waiting.append(f"soak-{index}")
    while waiting or core.has_unfinished_requests():
        while waiting and len(asked) - len(aborted) < 24:
            name = waiting.pop(0)
            prompt, kind, options = random_request(rng, words)
            asked[name] = (prompt, kind, options)
            core.add_request(
                name,
                {"prompt_token_ids": prompt},
                running.params(rng.randint(1, 12), temperature=rng.choice([0.0, 1.0]), **options),
            )
        if rng.random() < 0.03:
            name = rng.choice(sorted(set(asked) - aborted))
            core.abort_request([name])
            aborted.add(name)
        for output in core.step():
            if not output.finished or output.request_id in aborted:
                continue
            prompt, kind, options = asked.pop(output.request_id)
            path = output.kv_transfer_params["hidden_states_path"]
            tokens = [*prompt, *output.outputs[0].token_ids]
            rows = expected_rows(kind, options, len(prompt), len(tokens))
            loaded = load_hidden_states(path, timeout=60)
            assert loaded["token_ids"].tolist() == tokens[:-1][rows]
            wanted = oracle.hidden_states(model, tokens[:-1], options["layers"])[rows]
            error = (loaded["hidden_states"] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert not len(error) or error.max() < running.TOLERANCE, (output.request_id, kind, options)
            checked += 1
        if checked > 200 and descriptors is None:
            gc.collect()
            descriptors = open_descriptors()
    assert checked == NUM_REQUESTS - len(aborted)
    assert len(aborted) > 20
    for lock in storage.glob("*.lock"):  # published, or its reader is told
        target = lock.with_name(lock.name.removesuffix(".lock"))
        if not target.exists():
            with pytest.raises(HiddenStatesError, match="aborted"):
                load_hidden_states(target, timeout=60)
    assert not list(storage.glob(".*"))
    gc.collect()
    assert open_descriptors() <= descriptors + 40
