"""Extraction: right rows whatever runs beside them, failures that stay their own, and a consumer that decides how far it goes."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from extraction_cases import capture_of, engine, extract, random_prompts, recorder_of

from layertap.capture.request import Window
from layertap.engines.base import ExtractJob
from layertap.engines.fp8 import quantize
from layertap.engines.transformers.engine import TransformersEngine
from layertap.errors import HiddenStatesError, LayertapError, PromptError
from layertap.testing import oracle, zoo
from layertap.writing.recorder import Capture

LENGTHS = (5, 40, 1, 17, 28)


@pytest.fixture
def llama(tmp_path):
    with closing(engine("llama", tmp_path, max_num_batched_tokens=64)) as made:
        yield made


def close_to(rows, truth):
    torch.testing.assert_close(rows, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gptj", "gemma2", "mamba2"])
def test_layers_come_in_the_callers_order(name, tmp_path):
    made, prompts = engine(name, tmp_path), random_prompts(LENGTHS)
    layers = [made.info.num_layers, 0, 2]
    model = zoo.build(name)
    for prompt, rows in zip(prompts, extract(made, prompts, layers), strict=True):
        close_to(rows, oracle.hidden_states(model, prompt, layers))


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_early_exit_equals_the_full_run_bit_for_bit(name, tmp_path):
    shallow, full, prompts = engine(name, tmp_path), engine(name, tmp_path), random_prompts(LENGTHS)
    everything = extract(full, prompts, range(full.info.num_layers + 1))
    for early, whole in zip(extract(shallow, prompts, [1, 2]), everything, strict=True):
        assert torch.equal(early, whole[:, 1:3])
    assert shallow.weights.depth == 2


def test_a_deeper_call_gives_the_same_rows_as_a_fresh_engine(tmp_path):
    grown, fresh, prompts = engine("llama", tmp_path), engine("llama", tmp_path), random_prompts(LENGTHS)
    extract(grown, prompts, [1])
    for a, b in zip(extract(grown, prompts, [4, 1]), extract(fresh, prompts, [4, 1]), strict=True):
        assert torch.equal(a, b)


def test_rows_do_not_depend_on_what_runs_beside_them(llama):
    prompt, others = random_prompts([19])[0], random_prompts([7, 40, 3, 11], seed=5)
    (alone,) = extract(llama, [prompt], [0, 2, 4])
    among = extract(llama, [others[0], prompt, *others[1:]], [0, 2, 4])[1]
    close_to(among, alone)


def test_only_the_positions_asked_for_are_delivered(llama):
    prompts = random_prompts(LENGTHS)
    whole = extract(llama, prompts, [3, 1])
    for rows, every in zip(extract(llama, prompts, [3, 1], window=Window(positions="last")), whole, strict=True):
        close_to(rows, every[-1:])
    longer = [prompt for prompt in prompts if len(prompt) > 4]
    some = extract(llama, longer, [3, 1], window=Window(positions=(2, 4)))
    for rows, every in zip(some, [rows for rows in whole if len(rows) > 4], strict=True):
        close_to(rows, every[2:4])


def test_rows_are_saved_in_the_dtype_asked_for(llama):
    prompts = random_prompts(LENGTHS)
    exact = extract(llama, prompts, [2])
    for rows, whole in zip(extract(llama, prompts, [2], dtype="bfloat16"), exact, strict=True):
        assert torch.equal(rows, whole.to(torch.bfloat16))


@pytest.mark.parametrize("lengths", [LENGTHS, (3,) * 12])  # few pieces of a batch are copied, many are gathered
def test_fp8_rows_are_quantized_from_the_rows(llama, lengths):
    prompts = random_prompts(lengths)
    for window in (Window(), Window(positions="last")):
        exact = extract(llama, prompts, [3, 0], window=window)
        for slots, rows in zip(extract(llama, prompts, [3, 0], dtype="fp8_e4m3", window=window), exact, strict=True):
            expected = torch.empty_like(slots)
            for layer in range(2):
                quantize(rows[:, layer], expected[:, layer])
            assert torch.equal(slots, expected)


def test_jobs_with_other_layers_and_dtypes_can_share_a_call(llama):
    prompts = random_prompts([6, 9, 12, 4])
    wanted = [([1], "float32"), ([4, 0], "float32"), ([1], "bfloat16"), ([1], "float32")]
    with closing(recorder_of(llama)) as recorder:
        captures = [
            capture_of(recorder, 64, p, layers, dtype, Window(), f"{i}")
            for i, (p, (layers, dtype)) in enumerate(zip(prompts, wanted, strict=True))
        ]
        jobs = [ExtractJob(index=i, token_ids=p, capture=captures[i]) for i, p in enumerate(prompts)]
        assert sorted(llama.extract(jobs)) == [0, 1, 2, 3]
        for prompt, capture, (layers, dtype) in zip(prompts, captures, wanted, strict=True):
            rows = torch.from_numpy(capture.result.result(60).rows.copy()).view(getattr(torch, dtype))
            truth = oracle.hidden_states(zoo.build("llama"), prompt, layers)
            torch.testing.assert_close(rows.float(), truth, atol=1e-4, rtol=1e-2 if dtype == "bfloat16" else 1e-4)


def test_bad_prompts_fail_by_themselves(llama):
    good = random_prompts([8, 9])
    prompts = [good[0], [], [9, llama.info.vocab_size], [9] * (llama.info.max_model_len + 1), [-1], good[1]]
    outcomes = extract(llama, prompts, [1])
    assert all(isinstance(outcomes[i], torch.Tensor) for i in (0, 5))
    for i, match in (
        (1, "empty"),
        (2, f"{llama.info.vocab_size} isn't in the vocabulary"),
        (3, "the model allows"),
        (4, "-1"),
    ):
        assert isinstance(outcomes[i], PromptError)
        assert match in str(outcomes[i])


def poison(made, raise_if):
    """Make the model itself fail on some inputs, as a real one does on a bug or for want of memory."""
    model = made.weights.at_least(made.info.num_layers)
    embeddings = model.get_input_embeddings()
    plain = embeddings.forward

    def forward(ids):
        raise_if(ids)
        return plain(ids)

    embeddings.forward = forward


def test_a_batch_that_breaks_is_run_one_by_one_and_only_the_guilty_prompt_fails(llama):
    llama.routes()

    def raise_if(ids):
        if (ids == 13).any():
            raise RuntimeError("unlucky token")

    poison(llama, raise_if)
    prompts = [[10, 11, 12], [12, 13], [14, 15]]
    outcomes = extract(llama, prompts, [0, 4])
    assert isinstance(outcomes[1], LayertapError | HiddenStatesError)
    assert "unlucky token" in str(outcomes[1])
    for i in (0, 2):
        close_to(outcomes[i], oracle.hidden_states(zoo.build("llama"), prompts[i], [0, 4]))


def test_out_of_memory_halves_the_batches_and_goes_on(tmp_path):
    made = engine("llama", tmp_path, max_num_batched_tokens=1024)
    made.routes()

    def raise_if(ids):
        if ids.numel() > 300:
            raise torch.OutOfMemoryError("no room")

    poison(made, raise_if)
    prompts = random_prompts([100] * 10)
    for prompt, rows in zip(prompts, extract(made, prompts, [2]), strict=True):
        close_to(rows, oracle.hidden_states(zoo.build("llama"), prompt, [2]))


def test_out_of_memory_takes_buffers_before_it_halves_batches_or_fails_a_prompt(llama):
    llama.routes()
    arenas = llama._extractor._arenas
    arenas._count = 6
    failures = ["no room", "no room"]

    def raise_if(ids):
        if ids.numel() >= 64 and failures:
            raise torch.OutOfMemoryError(failures.pop())

    poison(llama, raise_if)
    (prompt,) = random_prompts([100])  # it goes alone
    (rows,) = extract(llama, [prompt], [2])
    close_to(rows, oracle.hidden_states(zoo.build("llama"), prompt, [2]))
    assert arenas._count == 2
    assert llama._extractor.budget_tokens == 64
    failures += ["no room"] * 2
    (outcome,) = extract(llama, [prompt], [2])
    assert "the memory is too small for 100 tokens" in str(outcome)


def test_rows_of_an_extraction_do_not_wait_for_the_byte_budget(llama, monkeypatch):
    """Their arenas are bounded; two waits for one memory would keep the device idle."""
    added = []
    real = Capture.add

    def add(capture, rows):
        added.append(rows.is_bounded)
        real(capture, rows)

    monkeypatch.setattr(Capture, "add", add)
    extract(llama, random_prompts([5, 70]), [2])
    assert added == [True, True]


def test_a_consumer_that_stops_pulling_stops_the_engine(llama):
    pulled: list[int] = []
    with closing(recorder_of(llama)) as recorder:
        captures = []

        def endless() -> Iterator[ExtractJob]:
            while True:
                prompt = random_prompts([20], seed=len(pulled))[0]
                captures.append(capture_of(recorder, 64, prompt, [1], "float32", Window(), f"{len(pulled)}"))
                pulled.append(len(pulled))
                yield ExtractJob(index=len(pulled) - 1, token_ids=prompt, capture=captures[-1])

        results = llama.extract(endless())
        delivered = {next(results), next(results)}
        results.close()
        assert len(pulled) < 40
        finished = {i for i, capture in enumerate(captures) if capture.result.exception(60) is None}
        assert delivered <= finished
        reasons = {str(c.result.exception()) for i, c in enumerate(captures) if i not in finished}
        assert reasons
        assert all("stopped before" in reason for reason in reasons)


def test_callers_on_several_threads_get_their_own_rows(llama):
    prompts = [random_prompts(LENGTHS, seed=seed) for seed in range(4)]
    results: dict[int, list] = {}

    def work(number):
        results[number] = extract(llama, prompts[number], [number, 4 - number] if number != 2 else [2])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = zoo.build("llama")
    for number, outcomes in results.items():
        layers = [number, 4 - number] if number != 2 else [2]
        for prompt, rows in zip(prompts[number], outcomes, strict=True):
            close_to(rows, oracle.hidden_states(model, prompt, layers))


def test_results_in_memory_outlive_the_engines_buffers(llama):
    prompts = random_prompts([30, 30])
    first = extract(llama, prompts, [1, 4])
    kept = [rows.clone() for rows in first]
    extract(llama, random_prompts([30, 30], seed=9), [1, 4])
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_a_prompt_longer_than_the_budget_runs_by_itself(tmp_path):
    made = engine("llama", tmp_path, max_num_batched_tokens=16)
    prompts = random_prompts([50, 3, 3])
    for prompt, rows in zip(prompts, extract(made, prompts, [4]), strict=True):
        close_to(rows, oracle.hidden_states(zoo.build("llama"), prompt, [4]))


@pytest.mark.parametrize("name", ["llama-dynamic-ntk", "phi3-longrope"])
def test_a_long_prompt_leaves_no_trace_in_the_rotary_table_of_the_next(name, tmp_path):
    made = engine(name, tmp_path)
    short, long = random_prompts([12])[0], random_prompts([30])[0]
    before = extract(made, [short, long], [4])
    after = extract(made, [long, short, long], [4])
    assert torch.equal(before[0], after[1])
    assert torch.equal(before[1], after[2])


def test_new_weights_are_those_of_the_next_extraction(tmp_path):
    made = engine("llama", tmp_path / "old")
    (prompt,) = random_prompts([12])
    extract(made, [prompt], [1])  # loads a part of the model, the exchange all of it
    newer = zoo.build("llama")
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(1.5)
    newer.save_pretrained(tmp_path / "new")
    made.reload(tmp_path / "new")
    (rows,) = extract(made, [prompt], [1])
    close_to(rows, oracle.hidden_states(newer, prompt, [1]))


def test_a_deeper_call_that_fails_leaves_the_others_alone(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    made = TransformersEngine(tmp_path)
    prompts = random_prompts([5, 6, 7])
    with closing(recorder_of(made)) as recorder:
        layers = [1, 1, 4]  # the others wait for company when the deep one comes
        captures = [
            capture_of(recorder, 64, prompt, [layer], "float32", Window(), f"{i}")
            for i, (prompt, layer) in enumerate(zip(prompts, layers, strict=True))
        ]

        def jobs() -> Iterator[ExtractJob]:
            for i, prompt in enumerate(prompts):
                if i == 2:
                    (tmp_path / index["model.layers.3.mlp.down_proj.weight"]).unlink()
                yield ExtractJob(index=i, token_ids=prompt, capture=captures[i])

        assert sorted(made.extract(jobs())) == [0, 1, 2]
        assert "missing" in str(captures[2].result.exception(60))
        for i in (0, 1):
            rows = torch.from_numpy(captures[i].result.result(60).rows.copy()).view(torch.float32)
            close_to(rows, oracle.hidden_states(zoo.build("llama"), prompts[i], [1]))


def test_blocks_that_cannot_be_compiled_run_as_they_are(llama):
    llama.routes()
    extractor = llama._extractor

    def broken(*_):
        raise RuntimeError("no C compiler")

    extractor._passes.compile_packed(backend=broken)
    extractor._compiled = True
    prompts = random_prompts([9, 12])
    for prompt, rows in zip(prompts, extract(llama, prompts, [2]), strict=True):
        close_to(rows, oracle.hidden_states(zoo.build("llama"), prompt, [2]))
    assert not extractor._compiled
    assert not extractor._may_compile
