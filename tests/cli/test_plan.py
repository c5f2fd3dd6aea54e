import json

import pytest
from typer.testing import CliRunner

from layertap import LLM
from layertap.cli.app import make_app
from layertap.cli.plan import lines_of
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.plan import _tokens_per_second, make_plan
from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions
from layertap.prompts import Prompt
from layertap.testing import zoo


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(zoo.save("llama", tmp_path_factory.mktemp("zoo") / "llama"))


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "why? " * n}, {"role": "assistant", "content": "so. " * (n % 3 + 1)}]}
        for n in range(1, 13)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "long " * 200}, {"no": "prompt"}]))
    return path


@pytest.mark.parametrize("positions", ["all", "trained"])
def test_a_plan_of_everything_is_what_the_run_then_takes(model, chats, tmp_path, positions):
    options = RunOptions(layers=[0, 2], positions=positions, shards=ShardOptions(fsync=False))
    engine = {"max_model_len": 100, "dtype": "float32", "device": "cpu"}
    plan = make_plan(model, open_input(chats), options, tmp_path, **engine)
    with LLM(model, **engine) as llm:
        report = extract_dataset(llm, open_input(chats), tmp_path / "states", options)
        assert (plan.info.num_layers, plan.info.hidden_size) == (llm.info.num_layers, llm.info.hidden_size)
    ds = open_dataset(tmp_path / "states")
    assert plan.input.is_exact
    assert plan.num_rows == ds.num_tokens == report.num_tokens
    assert plan.input.num_runnable == len(ds) == 12
    assert plan.input.share_failing == pytest.approx(2 / 14)
    written = sum(path.stat().st_size for path in (tmp_path / "states").glob("shards/*"))
    # a shard's header keeps room for the digests of more rows than came
    assert 0.95 * plan.disk_bytes < written < plan.disk_bytes + 1_000_000


def test_a_sample_gives_an_estimate_with_its_error(model, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [5] * (1 + n % 20)}) + "\n" for n in range(2000)))
    plan = make_plan(model, open_input(path), RunOptions(layers="all"), tmp_path, sample=400)
    true = sum(1 + n % 20 for n in range(2000))
    assert not plan.input.is_exact
    assert plan.input.num_records == 2000
    assert 0 < plan.input.tokens_error < true / 10
    assert abs(plan.input.tokens - true) < 2 * plan.input.tokens_error


def test_fewer_layers_run_fewer_blocks_and_options_say_what_they_save(model, chats, tmp_path):
    first, last = (make_plan(model, open_input(chats), RunOptions(layers=one), tmp_path) for one in ([0, 1], [0, -1]))
    assert first.num_blocks == 1
    assert first.weights_bytes < last.weights_bytes <= last.all_weights_bytes
    saved = dict(last.savings)
    assert saved["--positions trained"] < last.disk_bytes
    half = make_plan(model, open_input(chats), RunOptions(layers=[0, -1], save_dtype="bfloat16"), tmp_path)
    assert saved["--save-dtype bfloat16"] == half.disk_bytes


def test_a_measurement_runs_no_more_than_its_time_allows_but_for_the_first_part(model):
    ran = []

    class Watched:
        def __init__(self, llm):
            self._llm = llm

        def extract(self, prompts, **options):
            for sample in self._llm.extract(prompts, **options):
                ran.append(len(sample.token_ids))
                yield sample

    prompts = [Prompt(token_ids=[9] * 30), Prompt(token_ids=[9] * 50)]
    with LLM(model, dtype="float32", device="cpu") as llm:
        for seconds, most in ((0.0, 512 + 50), (0.5, 10**9)):
            ran.clear()
            assert _tokens_per_second(Watched(llm), prompts, (0, 2), RunOptions(layers=[0, 2]), seconds) > 0
            assert 512 <= sum(ran) <= most


def test_the_command_says_it_in_words_and_writes_nothing(model, chats, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    words = ["plan", model, str(chats), "--layers", "0,-1", "--measure", "--measure-seconds", "0.2", "--device", "cpu"]
    result = CliRunner().invoke(make_app(), words)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[:3]] == ["model", "layers", "input"]
    for part in ("would fail", "tokens/s, measured here", "of weights", "instead", "there is no prompt"):
        assert part in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_a_measurement_says_what_fp8_changes_in_each_layer(model, chats, tmp_path):
    options = RunOptions(layers=[0, -1], save_dtype="fp8_e4m3")
    plan = make_plan(model, open_input(chats), options, tmp_path, measure_seconds=0.1, device="cpu")
    assert [one.layer for one in plan.rounding] == list(plan.layers)
    assert all(0.01 < one.mean <= one.worst < 1 / 16 for one in plan.rounding)
    plain = make_plan(model, open_input(chats), RunOptions(layers=[0, -1]), tmp_path)
    assert dict(plain.savings)["--save-dtype fp8_e4m3"] == plan.disk_bytes < plain.disk_bytes / 2
    assert not plain.rounding
    text = "\n".join(lines_of(plan))
    assert f"rounding layer 0: rows in fp8_e4m3 are off by {plan.rounding[0].mean:.1%} on average" in text


def test_an_input_of_which_nothing_can_be_run_is_an_error(model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    result = CliRunner().invoke(make_app(), ["plan", model, str(tmp_path / "in.jsonl"), "--layers", "all"])
    assert result.exit_code == 1
    assert "none of 1 records can be run" in result.output
