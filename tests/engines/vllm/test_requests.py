"""One engine with chunks of 64 tokens and a KV cache that is too small for its load: every request's rows equal the oracle's."""

import json
import random
import shutil

import checkpoints
import pytest
import running
from running import check_file, params, prompts

from layertap import load_hidden_states
from layertap.errors import HiddenStatesError, OptionError, TargetExistsError


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def model(checkpoint):
    return running.load_oracle("llama", checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint, storage):
    # 10 blocks of 32 tokens: one request of 256 fits, eight of 100 do not
    with running.running(
        checkpoint, storage, {"allow_custom_save_path": True}, block_size=32, num_gpu_blocks_override=10
    ) as engine:
        yield engine


def generate(llm, inputs, sampling):
    return llm.generate(inputs, sampling, use_tqdm=False)


def tokens_of(output, choice=0):
    return [*output.prompt_token_ids, *output.outputs[choice].token_ids]


def test_concurrent_requests_of_mixed_lengths_and_options_keep_their_own_rows(llm, model):
    rng = random.Random(1)
    cases = [
        {"include_output_tokens": True},
        {"layers": [4, 1], "include_output_tokens": True},
        {"layers": "last", "positions": "last"},
        {"layers": [0], "positions": "output"},
        {"layers": [2, 3], "positions": [3, 9]},
        {},
        {"positions": "last", "include_output_tokens": True},
        {"capture": False},
    ]
    lengths = [rng.choice([10, 30, 70, 100, 130]) for _ in range(48)]
    options = [cases[i % len(cases)] for i in range(48)]
    outputs = generate(llm, prompts(lengths, seed=2), [params(12, **option) for option in options])
    for output, option in zip(outputs, options, strict=True):
        if option.get("capture") is False:
            assert output.kv_transfer_params is None
            continue
        path = output.kv_transfer_params["hidden_states_path"]
        prompt_len, tokens = len(output.prompt_token_ids), tokens_of(output)
        layers = {None: range(5), "last": [4]}.get(str(option.get("layers", "None")).replace("None", "") or None)
        layers = layers if layers is not None else ([4] if option["layers"] == "last" else option["layers"])
        end = (
            len(tokens) - 1
            if option.get("include_output_tokens") or option.get("positions") == "output"
            else prompt_len
        )
        rows = {
            "last": slice(end - 1, end),
            "output": slice(prompt_len, end),
            "None": slice(0, end),
        }.get(str(option.get("positions")), slice(3, 9))
        check_file(model, path, tokens[:-1], layers=layers, rows=rows)


def test_preempted_requests_are_replayed_into_complete_files(llm, model):
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    original = scheduler._preempt_request

    def count(request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = count
    try:
        outputs = generate(llm, prompts([40] * 8, seed=3), params(60, include_output_tokens=True))
    finally:
        scheduler._preempt_request = original
    assert preempted
    for output in outputs:
        check_file(model, output.kv_transfer_params["hidden_states_path"], tokens_of(output)[:-1])


def test_prefix_hits_of_others_dont_cost_a_captured_request_its_rows(llm, model):
    shared = prompts([90, 120], seed=4, shared_prefix=80)
    generate(llm, shared[:1], params(1, capture=False))
    captured, plain = generate(llm, [shared[1], shared[1]], [params(4), params(4, capture=False)])
    check_file(model, captured.kv_transfer_params["hidden_states_path"], captured.prompt_token_ids)
    again = generate(llm, shared[:1], params(1, capture=False))[0]
    assert again.num_cached_tokens >= 64  # a captured request fills the cache that it didn't read
    assert plain.outputs[0].token_ids == captured.outputs[0].token_ids


def test_the_last_prompt_row_is_captured_behind_a_prefix_hit(llm, model):
    (prompt,) = prompts([100], seed=5)
    generate(llm, [prompt], params(1, capture=False))
    output = generate(llm, [prompt], params(1, positions="last"))[0]
    assert output.num_cached_tokens >= 64
    check_file(model, output.kv_transfer_params["hidden_states_path"], output.prompt_token_ids, rows=slice(99, 100))


def test_each_choice_has_a_file_of_its_own_tokens_and_the_tag_finds_them(llm, model, storage):
    sampling = params(10, temperature=1.0, n=3, include_output_tokens=True, tag="three")
    output = generate(llm, prompts([25], seed=6), sampling)[0]
    record = json.loads((storage / "tags" / "three.json").read_text())
    assert len(record["handles"]) == 3
    for choice, handle in enumerate(record["handles"]):
        check_file(model, handle["hidden_states_path"], tokens_of(output, choice)[:-1])
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1


def test_choices_of_a_request_with_a_path_get_numbered_names(llm, model, tmp_path):
    sampling = params(
        5, temperature=1.0, n=2, include_output_tokens=True, hidden_states_path=str(tmp_path / "x.safetensors")
    )
    output = generate(llm, prompts([12], seed=7), sampling)[0]
    check_file(model, str(tmp_path / "x.safetensors"), tokens_of(output, 0)[:-1])
    check_file(model, str(tmp_path / "x-0-1.safetensors"), tokens_of(output, 1)[:-1])


def test_a_stop_string_publishes_the_rows_of_the_tokens_that_were_kept(llm, model, storage):
    (prompt,) = prompts([20], seed=8)
    free = generate(llm, [prompt], params(30, capture=False))[0]
    text = free.outputs[0].text
    stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text[i : i + 2].strip())
    output = generate(llm, [prompt], params(30, stop=[stop], include_output_tokens=True, tag="stopped"))[0]
    assert output.outputs[0].finish_reason == "stop"
    handle = json.loads((storage / "tags" / "stopped.json").read_text())["handles"][0]
    check_file(model, handle["hidden_states_path"], tokens_of(output)[:-1])


def test_aborted_requests_are_reported_and_the_others_go_on(llm, model, storage):
    rng = random.Random(9)
    engine = llm.llm_engine
    for index, prompt in enumerate(prompts([60] * 12, seed=9)):
        engine.add_request(f"abort-{index}", prompt, params(20, include_output_tokens=True, tag=f"abort-{index}"))
    aborted, finished = set(), {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        running_ids = [f"abort-{i}" for i in range(12) if f"abort-{i}" not in finished and f"abort-{i}" not in aborted]
        if running_ids and len(aborted) < 6 and rng.random() < 0.3:
            victim = rng.choice(running_ids)
            engine.abort_request([victim])
            aborted.add(victim)
    assert aborted
    assert len(finished) >= 6
    for name in aborted:
        path = json.loads((storage / "tags" / f"{name}.json").read_text())["handles"][0]["hidden_states_path"]
        with pytest.raises(HiddenStatesError, match="aborted"):
            load_hidden_states(path, timeout=30)
    for output in finished.values():
        if output.request_id not in aborted:
            check_file(model, output.kv_transfer_params["hidden_states_path"], tokens_of(output)[:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": [1]}, "did you mean 'layers'"),
        ({"layers": [9]}, "layer 9 doesn't exist"),
        ({"positions": [3, 900]}, "outside"),
        ({"capture": "no"}, "expected true or false"),
        ({"save_dtype": "float8"}, "expected one of"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_generated(llm, options, message):
    with pytest.raises(OptionError, match=message):
        generate(llm, prompts([5]), params(2, **options))


def test_an_existing_file_is_refused_and_replaced_only_when_asked(llm, model, tmp_path):
    target = tmp_path / "kept.safetensors"
    target.write_bytes(b"mine")
    with pytest.raises(TargetExistsError):
        generate(llm, prompts([5]), params(2, hidden_states_path=str(target)))
    assert target.read_bytes() == b"mine"
    output = generate(llm, prompts([5]), params(2, hidden_states_path=str(target), overwrite=True))[0]
    check_file(model, str(target), output.prompt_token_ids)


def test_saved_dtype_is_converted_on_the_way(llm, model):
    import torch

    from layertap.testing import oracle

    output = generate(llm, prompts([33], seed=11), params(1, save_dtype="bfloat16"))[0]
    loaded = load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=30)
    assert loaded["hidden_states"].dtype == torch.bfloat16
    wanted = oracle.hidden_states(model, output.prompt_token_ids)
    torch.testing.assert_close(loaded["hidden_states"].float(), wanted, rtol=2**-7, atol=1e-3)


def test_fp8_rows_have_a_scale_a_token_and_layer(llm, model):
    from layertap.testing import oracle

    output = generate(llm, prompts([33], seed=16), params(3, save_dtype="fp8_e4m3", include_output_tokens=True))[0]
    path = output.kv_transfer_params["hidden_states_path"]
    read = load_hidden_states(path, timeout=30, dtype="float32")
    wanted = oracle.hidden_states(model, read["token_ids"].tolist())
    assert ((read["hidden_states"] - wanted).norm(dim=-1) <= wanted.norm(dim=-1) / 16).all()
    assert load_hidden_states(path)["hidden_states_scale"].shape == wanted.shape[:2]


def test_a_bad_option_that_reaches_the_scheduler_fails_the_request_and_not_the_engine(llm, model, storage, monkeypatch):
    from layertap.engines.vllm import frontend_check

    monkeypatch.setattr(frontend_check, "check", lambda processor, request: None)  # an older front end, say
    output = generate(llm, prompts([5], seed=12), params(4, layers=[77]))[0]
    assert "layer 77 doesn't exist" in output.kv_transfer_params["hidden_states_error"]
    errors = [path for path in storage.glob("*.error") if "layer 77" in path.read_text()]
    assert len(errors) == 1
    good = generate(llm, prompts([5], seed=13), params(2))[0]
    check_file(model, good.kv_transfer_params["hidden_states_path"], good.prompt_token_ids)


def test_a_folder_that_vanishes_fails_the_request_and_not_the_engine(llm, model, tmp_path):
    gone = tmp_path / "gone"
    gone.write_text("a file where a folder is wanted")
    output = generate(llm, prompts([9], seed=14), params(2, hidden_states_path=str(gone / "x.safetensors")))[0]
    with pytest.raises((HiddenStatesError, NotADirectoryError)):
        load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=5)
    good = generate(llm, prompts([5], seed=15), params(2))[0]
    check_file(model, good.kv_transfer_params["hidden_states_path"], good.prompt_token_ids)


def test_nothing_is_left_behind(llm, storage):
    tap = next(iter(__import__("layertap.engines.vllm.worker", fromlist=["_taps"])._taps.values()))
    assert tap.tap.host_ring.used == 0
    assert not tap._wants
    assert not [path for path in storage.rglob("*") if path.name.endswith(".layertap-tmp")]
    shutil.rmtree(storage / "tags", ignore_errors=True)
