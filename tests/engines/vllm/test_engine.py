"""`layertap.LLM(engine="vllm")`: the embedded engine's surface over vLLM."""

from dataclasses import replace
from pathlib import Path

import checkpoints
import drafts
import numpy as np
import pytest
import running
import torch
from running import check_file, prompts

from layertap import LLM, SamplingParams, load_hidden_states
from layertap.engines.vllm import engine as vllm_engine
from layertap.errors import ExtractionError, OptionError
from layertap.files.read import read_file, read_header
from layertap.testing import oracle
from layertap.trust import vllm as vllm_trust
from layertap.trust.findings import Report
from layertap.trust.vllm import examine_vllm


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("qwen3", checkpoint_folder)


@pytest.fixture(scope="module")
def model(checkpoint):
    return running.load_oracle("qwen3", checkpoint)


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def llm(checkpoint, storage):
    with LLM(
        checkpoint,
        engine="vllm",
        layers="all",
        storage=storage,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        enable_lora=True,
        max_lora_rank=drafts.RANK,
    ) as engine:
        yield engine


def relative_error(rows, wanted):
    return float(((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def test_extract_returns_rows_in_memory_and_leaves_no_file(llm, model, storage):
    ids = [prompt["prompt_token_ids"] for prompt in prompts([3, 90, 40, 200], seed=1)]
    samples = {sample.index: sample for sample in llm.extract(ids, layers=[3, 0, 4])}
    assert sorted(samples) == [0, 1, 2, 3]
    for index, sample in samples.items():
        assert sample.layers == (3, 0, 4)
        assert sample.token_ids.tolist() == ids[index]
        assert sample.result.info.facts["finish_reason"] == "prefill"
        assert relative_error(sample.hidden_states, oracle.hidden_states(model, ids[index], [3, 0, 4])) < 1e-4
    assert not list(storage.iterdir())


def test_extract_writes_files_into_the_folder_it_is_given(llm, model, tmp_path):
    ids = [prompt["prompt_token_ids"] for prompt in prompts([30, 60], seed=2)]
    for sample in llm.extract(ids, layers="last", storage=tmp_path, positions="last"):
        assert sample.path.parent == tmp_path
        expected = oracle.hidden_states(model, ids[sample.index], [4])[-1:]
        assert relative_error(sample.hidden_states, expected) < 1e-4


def test_a_prompt_that_cant_be_run_doesnt_stop_the_others(llm):
    ids = [[9, 10], [], [11, 12], [9] * 400]
    samples = llm.extract(ids, layers=[1])
    assert sorted(next(samples).index for _ in range(2)) == [0, 2]
    with pytest.raises(ExtractionError) as raised:
        next(samples)
    assert [index for index, _ in raised.value.failures] == [1, 3]


def test_generate_gives_each_choice_its_handle(llm, model):
    params = SamplingParams(
        n=2,
        max_tokens=6,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": True, "tag": "gen"}},
    )
    output = llm.generate(prompts([21], seed=3), params, use_tqdm=False)[0]
    assert output.kv_transfer_params == output.outputs[0].kv_transfer_params
    for choice in output.outputs:
        tokens = [*output.prompt_token_ids, *choice.token_ids]
        check_file(model, choice.kv_transfer_params["hidden_states_path"], tokens[:-1])


def test_a_stop_string_keeps_its_handle(llm, model):
    (prompt,) = prompts([20], seed=4)
    free = llm.generate(
        prompt,
        SamplingParams(
            temperature=0, max_tokens=30, ignore_eos=True, extra_args={"kv_transfer_params": {"capture": False}}
        ),
        use_tqdm=False,
    )[0]
    text = free.outputs[0].text
    stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text[i : i + 2].strip())
    params = SamplingParams(
        temperature=0,
        max_tokens=30,
        ignore_eos=True,
        stop=[stop],
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    choice = output.outputs[0]
    assert choice.finish_reason == "stop"
    check_file(
        model, choice.kv_transfer_params["hidden_states_path"], [*output.prompt_token_ids, *choice.token_ids][:-1]
    )


def test_chat_runs_the_models_template(llm, model):
    messages = [{"role": "user", "content": "hello"}]
    output = llm.chat(
        messages, SamplingParams(max_tokens=2, temperature=0, extra_args={"kv_transfer_params": {}}), use_tqdm=False
    )[0]
    check_file(model, output.kv_transfer_params["hidden_states_path"], output.prompt_token_ids)


def test_bad_options_are_refused_before_anything_runs(llm, storage):
    before = sorted(storage.iterdir())
    for options in ({"layer": 1}, {"layers": [7]}, {"positions": [0, 999]}, {"tag": "gen"}):
        with pytest.raises(OptionError):
            llm.generate(
                prompts([4]), SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": options}), use_tqdm=False
            )
    assert sorted(storage.iterdir()) == before


REQUESTS = [
    {},
    {"layers": [4, 1]},
    {"include_output_tokens": True},
    {"positions": "last"},
    {"positions": "output"},
    {"positions": [2, 9], "layers": [0]},
    {"save_dtype": "bfloat16"},
    {"tag": "same", "include_output_tokens": True},
    {"hidden_states_path": "chosen.safetensors"},
    {"capture": False},
]
MADE_ANEW = {"request_id", "engine", "engine_version", "replica", "residual"}


def test_both_engines_write_the_same_files_for_the_same_requests(llm, checkpoint, storage, tmp_path):
    asked = prompts([14] * len(REQUESTS), seed=8)
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args={"kv_transfer_params": dict(options)})
        for options in REQUESTS
    ]
    theirs = llm.generate(asked[:-2] + asked[-1:], params[:-2] + params[-1:], use_tqdm=False)
    with LLM(checkpoint, layers="all", storage=tmp_path, dtype="float32") as embedded:
        ours = embedded.generate(asked[:-2] + asked[-1:], params[:-2] + params[-1:], use_tqdm=False)
        for engine in (llm, embedded):  # neither allows a client's path: it is ignored with a warning
            (output,) = engine.generate(asked[-2:-1], params[-2:-1], use_tqdm=False)
            assert not output.kv_transfer_params["hidden_states_path"].endswith("chosen.safetensors")
    for mine, other, options in zip(ours, theirs, REQUESTS[:-2] + REQUESTS[-1:], strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        if options.get("capture") is False:
            assert mine.kv_transfer_params is None
            assert other.kv_transfer_params is None
            continue
        assert mine.kv_transfer_params.keys() == other.kv_transfer_params.keys()
        paths = [Path(output.kv_transfer_params["hidden_states_path"]) for output in (mine, other)]
        rows = [load_hidden_states(path, timeout=30) for path in paths]
        assert torch.equal(rows[0]["token_ids"], rows[1]["token_ids"])
        assert rows[0]["hidden_states"].dtype == rows[1]["hidden_states"].dtype
        tolerance = 2**-6 if "save_dtype" in options else 1e-4
        torch.testing.assert_close(
            rows[0]["hidden_states"].float(), rows[1]["hidden_states"].float(), rtol=tolerance, atol=tolerance
        )
        first, second = (read_header(path).info for path in paths)
        assert replace(first, facts={}) == replace(second, facts={})
        assert {k: v for k, v in first.facts.items() if k not in MADE_ANEW} == {
            k: v for k, v in second.facts.items() if k not in MADE_ANEW
        }
    for folder in (storage, tmp_path):
        assert (folder / "tags" / "same.json").exists()


def test_where_nothing_is_taken_by_default_both_engines_take_what_asks_for_it(llm, checkpoint, tmp_path, monkeypatch):
    asked = [None, {}, {"layers": [1]}, {"capture": False}, {"capture": True, "layers": [3, 1]}]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=3,
            ignore_eos=True,
            extra_args=None if options is None else {"kv_transfer_params": options},
        )
        for options in asked
    ]
    front = llm._front
    monkeypatch.setattr(front, "options", replace(front.options, capture_by_default=False))
    theirs = llm.generate(prompts([14] * len(asked), seed=12), params, use_tqdm=False)
    config = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_extra_config": {
            "layers": "all", "shared_storage_path": str(tmp_path), "capture_by_default": False
        },
    }  # fmt: skip
    with LLM(checkpoint, kv_transfer_config=config, dtype="float32") as embedded:
        ours = embedded.generate(prompts([14] * len(asked), seed=12), params, use_tqdm=False)
    for outputs in (ours, theirs):
        assert [output.kv_transfer_params is None for output in outputs] == [True] * 4 + [False]
    mine, other = (
        load_hidden_states(outputs[-1].kv_transfer_params["hidden_states_path"], timeout=30)
        for outputs in (ours, theirs)
    )
    assert torch.equal(mine["token_ids"], other["token_ids"])
    torch.testing.assert_close(mine["hidden_states"], other["hidden_states"], rtol=1e-4, atol=1e-4)
    assert mine["hidden_states"].shape[1] == 2


def test_structured_output_and_adapters_go_through_to_vllm(llm, model, checkpoint, tmp_path):
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    captured = {"kv_transfer_params": {"include_output_tokens": True}}
    chosen = StructuredOutputsParams(choice=["yes", "no"])
    params = [
        VllmSamplingParams(max_tokens=20, temperature=0, structured_outputs=chosen, extra_args=captured),
        {"max_tokens": 20, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}, "extra_args": captured},
    ]
    for output in llm.generate(prompts([12, 30], seed=9), params, use_tqdm=False):
        assert output.outputs[0].text.endswith(("yes", "no"))
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        check_file(model, output.kv_transfer_params["hidden_states_path"], tokens[:-1])
    with pytest.raises(OptionError, match="no_such_thing"):
        llm.generate(prompts([4]), {"no_such_thing": 1}, use_tqdm=False)
    adapter = drafts.save_adapter(model, tmp_path / "adapter", seed=3)
    lora = LoRARequest("mine", 1, str(adapter))
    merged = drafts.merge(running.load_oracle("qwen3", checkpoint), adapter)
    (output,) = llm.generate(
        prompts([20], seed=10), SamplingParams(max_tokens=2, extra_args=captured), use_tqdm=False, lora_request=lora
    )
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    check_file(merged, output.kv_transfer_params["hidden_states_path"], tokens[:-1])
    ids = prompts([25], seed=11)[0]["prompt_token_ids"]
    (sample,) = llm.extract([ids], lora_request=lora)
    assert sample.result.info.facts["lora"] == "mine"
    assert relative_error(sample.hidden_states, oracle.hidden_states(merged, ids)) < 1e-4


def test_the_doctor_finds_rows_tokens_and_logprobs_right(llm):
    report = Report(model="m", engine="vllm")
    examine_vllm(report, llm, trust_remote_code=False)
    assert not report.bad, report.bad
    assert [entry.layer for entry in report.layers] == list(range(5))
    assert all(entry.worst < 1e-4 for entry in report.layers)
    states = {finding.name: finding.state for finding in report.findings}
    assert states["prompts"] == "good"  # one goes in chunks
    assert states["generated and prefilled"] == states["last layer to vLLM's tokens"] == "good"


def shifted(rows):
    return np.roll(rows, 1, axis=0)


def one_layer_off(rows):
    return np.concatenate([rows[:, :1], rows[:, :-1]], axis=1)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (shifted, {"against the reference", "generated and prefilled", "last layer to vLLM's tokens"}),
        (one_layer_off, {"against the reference", "layer ids", "last layer to vLLM's tokens"}),
    ],
)
def test_the_doctor_finds_wrong_rows(fault, named, llm, monkeypatch):
    def read(path, **options):
        loaded = read_file(path, **options)
        return replace(loaded, rows=np.ascontiguousarray(fault(loaded.rows)))

    monkeypatch.setattr(vllm_engine, "read_file", read)
    monkeypatch.setattr(vllm_trust, "read_file", read)
    report = Report(model="m", engine="vllm")
    examine_vllm(report, llm, trust_remote_code=False)
    assert named <= {finding.name for finding in report.bad}
