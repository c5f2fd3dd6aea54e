"""`prefix_rows_bytes`: capturing requests read the prefix cache as far as rows are kept, and their rows stay the oracle's.

One engine with chunks of 64 tokens, a KV cache that is too small for its load and a store that is too small for its prompts.
"""

import random
from types import SimpleNamespace

import checkpoints
import pytest
import running
from running import check_file, params, prompts

from layertap import load_hidden_states
from layertap.errors import EngineError, HiddenStatesError, OptionError

BLOCK = 32
LIMIT = 300_000
"""Seven blocks of all five layers: 35 slots of 32 rows of 256 + 9 bytes."""


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def model(checkpoint):
    return running.load_oracle("llama", checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    storage = tmp_path_factory.mktemp("states")
    extra = {"prefix_rows_bytes": LIMIT}
    with running.running(checkpoint, storage, extra, block_size=BLOCK, num_gpu_blocks_override=12) as engine:
        yield engine


def generate(llm, inputs, sampling):
    return llm.generate(inputs, sampling, use_tqdm=False)


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def counts(llm):
    return scheduler_of(llm).connector._plan.counts()


def check(model, output, layers=range(5), rows=slice(None)):
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    end = len(tokens) - 1 if rows is ... else len(output.prompt_token_ids)
    rows = slice(None) if rows is ... else rows
    check_file(model, output.kv_transfer_params["hidden_states_path"], tokens[:end], layers=layers, rows=rows)


def test_a_known_beginning_is_read_from_the_cache_and_its_rows_are_delivered(llm, model):
    first, second = prompts([100, 110], seed=21, shared_prefix=80)
    before = counts(llm)["prefix_hits"]
    (cold,) = generate(llm, [first], params(2))
    (warm,) = generate(llm, [second], params(2))
    (subset,) = generate(llm, [second], params(2, layers=[3, 1], save_dtype="float32"))
    assert (cold.num_cached_tokens, warm.num_cached_tokens, subset.num_cached_tokens) == (0, 64, 96)
    assert counts(llm)["prefix_hits"] - before == 64 + 96
    check(model, cold)
    check(model, warm)
    check(model, subset, layers=[3, 1])


def test_layers_that_nobody_kept_are_computed(llm, model):
    (prompt,) = prompts([100], seed=22)
    outputs = [generate(llm, [prompt], params(1, layers=layers))[0] for layers in ([2], [2, 4], [4, 2])]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 96]
    for output, layers in zip(outputs, ([2], [2, 4], [4, 2]), strict=True):
        check(model, output, layers=layers)


def test_blocks_that_only_plain_requests_computed_have_no_rows(llm, model):
    (prompt,) = prompts([100], seed=23)
    generate(llm, [prompt], params(1, capture=False))
    (captured,) = generate(llm, [prompt], params(1))
    (plain,) = generate(llm, [prompt], params(1, capture=False))
    assert (captured.num_cached_tokens, plain.num_cached_tokens) == (0, 96)
    check(model, captured)


def test_positions_need_only_their_own_rows(llm, model):
    (prompt,) = prompts([130], seed=24)
    generate(llm, [prompt], params(1, capture=False))
    (late,) = generate(llm, [prompt], params(1, positions=[70, 130]))
    assert late.num_cached_tokens == 64
    check(model, late, rows=slice(70, 130))


def test_a_salt_keeps_rows_apart(llm, model):
    (prompt,) = prompts([70], seed=25)
    outputs = [
        generate(llm, [{**prompt, "cache_salt": salt}], params(1, layers=[1]))[0] for salt in ("mine", "yours", "mine")
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 64]
    for output in outputs:
        check(model, output, layers=[1])


def test_a_reset_of_the_prefix_cache_drops_the_rows(llm, model):
    (prompt,) = prompts([100], seed=26)
    generate(llm, [prompt], params(1))
    assert counts(llm)["prefix_bytes"] > 0
    assert llm.reset_prefix_cache()
    assert counts(llm)["prefix_bytes"] == 0
    (again,) = generate(llm, [prompt], params(1))
    assert again.num_cached_tokens == 0
    check(model, again)


def test_rows_that_were_lost_fail_one_request_and_are_then_computed(llm, model):
    from layertap.engines.vllm import worker

    (prompt,) = prompts([100], seed=27)
    generate(llm, [prompt], params(1))
    tap = worker.local_tap(str(llm.llm_engine.vllm_config.kv_transfer_config.engine_id))
    tap.unpacker._prefix._there[:] = False
    (broken,) = generate(llm, [prompt], params(3))
    with pytest.raises(HiddenStatesError, match="lost on the way"):
        load_hidden_states(broken.kv_transfer_params["hidden_states_path"], timeout=30)
    generate(llm, prompts([5], seed=28), params(3, capture=False))  # by then the workers' counts are known
    (again,) = generate(llm, [prompt], params(1))
    assert again.num_cached_tokens == 0
    check(model, again)


def test_concurrent_requests_with_shared_beginnings_keep_their_own_rows(llm, model):
    rng = random.Random(3)
    scheduler = scheduler_of(llm)
    preempted, preempt = [], scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **kwargs: (
        preempted.append(request.request_id),
        preempt(request, *args, **kwargs),
    )[1]
    cases = [
        ({"include_output_tokens": True}, range(5), ...),
        ({"layers": [4, 1], "include_output_tokens": True}, [4, 1], ...),
        ({"layers": [2], "positions": [40, 70]}, [2], slice(40, 70)),
        ({}, range(5), slice(None)),
        ({"capture": False}, None, None),
        ({"layers": [0, 3]}, [0, 3], slice(None)),
    ]
    beginnings = [prompts([96], seed=seed)[0]["prompt_token_ids"] for seed in (31, 32, 33)]
    inputs = []
    for index in range(48):
        own = prompts([rng.choice([1, 9, 40, 64])], seed=100 + index)[0]["prompt_token_ids"]
        inputs.append({"prompt_token_ids": rng.choice(beginnings)[: rng.choice([72, 96])] + own})
    chosen = [cases[index % len(cases)] for index in range(48)]
    before = counts(llm)
    try:
        outputs = generate(llm, inputs, [params(rng.choice([2, 40]), **options) for options, _, _ in chosen])
    finally:
        scheduler._preempt_request = preempt
    after = counts(llm)
    assert preempted
    assert after["prefix_hits"] - before["prefix_hits"] > 500
    assert after["prefix_evictions"] > before["prefix_evictions"]
    assert 0 < after["prefix_bytes"] <= LIMIT
    assert sum(output.num_cached_tokens for output, case in zip(outputs, chosen, strict=True) if case[1]) > 500
    for output, (options, layers, rows) in zip(outputs, chosen, strict=True):
        if options.get("capture") is not False:
            check(model, output, layers=layers, rows=rows)


def test_what_is_kept_shows_in_vllms_metrics(llm):
    generate(llm, prompts([100] * 2, seed=29), params(2))
    reported = scheduler_of(llm).connector._reporter._last
    assert {"prefix_hits", "prefix_misses", "prefix_evictions", "prefix_bytes"} <= reported.keys()
    assert reported["prefix_misses"] > 0


@pytest.mark.parametrize(
    ("limit", "changes", "error", "message"),
    [
        (64 << 50, {}, OptionError, "more than this machine's memory"),
        (2191, {}, OptionError, "don't hold one block's rows of one layer, which take 2192"),
        (1 << 20, {"caching": False}, EngineError, "prefix caching is off"),
        (1 << 20, {"shared": True}, EngineError, "not inside MultiConnector"),
    ],
)
def test_where_it_cant_work_the_start_is_refused_with_one_sentence(limit, changes, error, message):
    import torch

    from layertap.capture.options import StoreOptions
    from layertap.engines.vllm import prefix_cache
    from layertap.engines.vllm.configured import Configured

    found = Configured(
        options=StoreOptions(prefix_rows_bytes=limit),
        layers=(1,),
        num_layers=4,
        hidden_size=64,
        dtype="float32",
        shared=changes.get("shared", False),
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=changes.get("caching", True)),
        model_config=SimpleNamespace(dtype=torch.bfloat16, is_hybrid=False),
    )
    with pytest.raises(error, match=message):
        prefix_cache.make_plan(config, found)
