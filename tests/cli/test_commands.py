"""The commands over a tiny random model, in this process."""

import json
import re
import shutil
import signal
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from layertap import LLM
from layertap.cli.app import make_app
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.fingerprint import model_fingerprint
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.testing import zoo


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(zoo.save("llama", tmp_path_factory.mktemp("zoo") / "llama"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command; a function of its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(sys, "argv", ["layertap", "extract", "the", "words that were typed"])
    runner = CliRunner()
    return lambda *words: runner.invoke(make_app(), [str(word) for word in words])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": f"number {number} of the prompts"} for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def states(run, model, prompts, tmp_path):
    result = run("extract", model, prompts, "--layers", "all", "--out", tmp_path / "states", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    return tmp_path / "states"


def test_extract_writes_a_data_set_and_says_what_it_did(states, run, model, prompts):
    assert len(open_dataset(states, verify=True)) == 8
    again = run("extract", model, prompts, "--layers", "all", "--out", states, "--dtype", "float32")
    assert again.exit_code == 0
    assert "8 samples had been done before, by checksum" in again.output


def test_a_run_that_could_not_begin_leaves_its_folder_to_the_next(run, model, prompts, tmp_path):
    hollow = tmp_path / "hollow"
    shutil.copytree(model, hollow)
    (hollow / "model.safetensors").rename(tmp_path / "weights")
    words = ("extract", hollow, prompts, "--layers", "all", "--out", tmp_path / "late")
    failed = run(*words)
    assert failed.exit_code == 1
    assert failed.output.count("can't load the weights") == 1
    (tmp_path / "weights").rename(hollow / "model.safetensors")
    assert run(*words).exit_code == 0
    assert len(open_dataset(tmp_path / "late", verify=True)) == 8


def test_extract_reads_text_and_options(run, model, tmp_path):
    (tmp_path / "in.txt").write_text("one\ntwo\n\nthree\n")
    words = ("extract", model, "in.txt", "--layers", "-1,0", "--out", "states", "--text-unit", "paragraph")
    words += (
        "--layout",
        "files",
        "--save-dtype",
        "bfloat16",
        "--limit",
        "1",
        "--device",
        "cpu",
        "--quiet",
        "--no-fsync",
    )
    result = run(*words)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "tokens/s" not in result.stderr
    ds = open_dataset(tmp_path / "states")
    assert (len(ds), ds.dtype, ds.manifest.layout) == (1, "bfloat16", "files")
    assert ds.layers[1] == 0


def test_failed_prompts_are_listed_and_the_exit_code_says_so(run, model, prompts, tmp_path):
    with prompts.open("a") as file:
        file.write('{"prompt": broken\n' + '{"prompt": ""}\n' * 12)
    result = run("extract", model, prompts, "--layers", "0", "--out", "states")
    assert result.exit_code == 3
    assert "13 prompts failed; all others were delivered:" in result.output
    assert f"{prompts} line 9 column 12: broken JSON" in result.output
    assert "and 3 more: layertap.open_dataset('states').failures" in result.output
    assert len(open_dataset(tmp_path / "states")) == 8


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("missing.jsonl", "--layers", "0", "--out", "states"), 1, "missing.jsonl: there is no such input file"),
        (("in.jsonl", "--layers", "99", "--out", "states"), 2, "layer 99 doesn't exist"),
        (("in.jsonl", "--layers", "eagle4", "--out", "states"), 2, "did you mean 'eagle3'"),
        (("in.jsonl", "--layers", "0", "--out", "states", "--limit", "0"), 2, "limit: expected at least 1"),
        (("in.jsonl", "--layers", "0", "--out", "states", "--shard-size", "big"), 2, "expected a size such as 2GiB"),
        (("in.jsonl", "--layers", "0", "--out", "in.jsonl"), 2, "in.jsonl: the folder can't be made"),
        (("in.jsonl", "--layers", "0", "--out", "states", "--layout", "heap"), 2, "heap"),
        (("in.jsonl", "--layers", "0"), 2, "--out"),
    ],
)
def test_wrong_words_are_refused_with_what_is_wrong(run, model, prompts, words, code, message, tmp_path):
    result = run("extract", model, *words)
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "states" / "manifest.json").exists()


def test_a_path_from_home_is_in_the_home_folder_with_or_without_a_shell(run, model, prompts, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(model, home / "m")
    shutil.copy(prompts, home / "in.jsonl")
    monkeypatch.setenv("HOME", str(home))
    result = run("extract", "~/m", "~/in.jsonl", "--layers", "1", "--out=~/by-command")
    assert result.exit_code == 0, result.output
    with LLM("~/m", layers="all", storage="~/requests") as llm:
        assert llm.info.model == str(home / "m")
        extract_dataset(llm, open_input("~/in.jsonl"), "~/by-python", RunOptions(layers=[1]))
        assert next(llm.extract([[9]], layers=[1], storage="~/files")).path.parent == home / "files"
        (output,) = llm.generate([[9]], {"max_tokens": 1}, use_tqdm=False)
        assert output.kv_transfer_params["hidden_states_path"].startswith(str(home / "requests"))
    manifests = [open_dataset(f"~/{name}").manifest for name in ("by-command", "by-python")]
    assert [one.rows.model_fingerprint for one in manifests] == [model_fingerprint(model, None)] * 2
    assert not (tmp_path / "~").exists()


def test_a_run_with_other_layers_is_refused(run, model, prompts, states):
    result = run("extract", model, prompts, "--layers", "0", "--out", states, "--dtype", "float32")
    assert result.exit_code == 2
    assert "layers: the data set has [0, 1" in result.output


def test_ctrl_c_leaves_complete_files_and_says_how_to_go_on(run, model, prompts, tmp_path):
    with prompts.open("a") as file:
        file.write('{"prompt": "and one more"}\n' * 1000)
    armed = True

    def interrupt(event, args):
        nonlocal armed
        if armed and event == "os.link" and str(tmp_path) in str(args[1]):
            armed = False
            signal.raise_signal(signal.SIGINT)

    sys.addaudithook(interrupt)
    words = (
        "extract",
        model,
        prompts,
        "--layers",
        "1",
        "--out",
        tmp_path / "states",
        "--dtype",
        "float32",
        "--no-fsync",
    )
    result = run(*words, "--shard-size", "10kB")
    assert not armed
    assert result.exit_code == 130, result.output
    assert "stopping: the prompts that are running are finished first" in result.output
    assert "layertap extract the 'words that were typed'" in result.output
    done = len(open_dataset(tmp_path / "states", verify=True))
    assert 0 < done < 1008
    assert not list((tmp_path / "states").glob("**/.*"))
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert f"{done:,} samples had been done before" in result.output
    assert len(open_dataset(tmp_path / "states", verify=True)) == 1008


def test_verify_checks_every_byte_and_computes_rows_again(states, run):
    result = run("verify", states)
    assert result.exit_code == 0
    assert "8 samples" in result.output
    assert "good" in result.output
    result = run("verify", states, "--sample", "3")
    assert result.exit_code == 0, result.output
    assert result.output.count("largest relative error") == 3
    shard = next(states.glob("shards/*.safetensors"))
    result = run("verify", shard)
    assert result.exit_code == 0
    assert "good" in result.output


def test_verify_finds_damage_and_rows_of_another_model(states, run, tmp_path):
    other = zoo.save("llama", tmp_path / "other", seed=1)
    result = run("verify", states, "--model", other, "--sample", "1")
    assert result.exit_code == 3
    assert "DIFFERENT" in result.output
    shard = next(states.glob("shards/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    result = run("verify", states)
    assert result.exit_code == 3
    assert "1 part damaged" in result.output
    assert run("verify", shard).exit_code == 1


def test_inspect_shows_what_a_data_set_and_its_samples_hold(states, run, model):
    result = run("inspect", states, "--sample", "-1", "--top", "2")
    assert result.exit_code == 0, result.output
    ds = open_dataset(states)
    rows = ds[-1]["hidden_states"].numpy()
    lengths = np.linalg.norm(rows, axis=-1)
    for expected in ("8 in 1 file (shards)", model, "input index    7", "layers change most"):
        assert expected in result.output
    for slot in range(len(ds.layers)):
        assert f"{lengths[:, slot].max():.2f}" in result.output
    assert len(rows) > 3
    assert "'" in result.output.split("at position")[1].splitlines()[1], "tokens are spelled by the model's tokenizer"


def test_inspect_draws_a_picture(states, run, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are an extra: layertap[plot]")
    from PIL import Image

    shard = next(states.glob("shards/*.safetensors"))
    for target, path in ((states, "a.png"), (shard, "b.png")):
        result = run("inspect", target, "--plot", path)
        assert result.exit_code == 0, result.output
        image = np.asarray(Image.open(tmp_path / path).convert("L"))
        assert image.shape[1] > 800
        assert image.std() > 20
    result = run("inspect", states, "--plot", "a.nonsense")
    assert result.exit_code == 2
    assert "a.nonsense" in result.output


def test_inspect_says_what_it_cannot_show(states, run, tmp_path):
    assert "sample: 8 of a data set of 8" in run("inspect", states, "--sample", "8").output
    assert run("inspect", tmp_path / "nothing").exit_code == 1
    (tmp_path / "text.safetensors").write_text("this is no such file at all")
    result = run("inspect", tmp_path / "text.safetensors")
    assert result.exit_code == 1
    assert "not a safetensors file" in result.output


def test_clean_removes_leftovers_and_nothing_else(states, run, tmp_path):
    stray = states / "shards" / "w0-000099.safetensors"
    stray.write_bytes(b"x" * 3000)
    result = run("clean", states, "--dry-run")
    assert (result.exit_code, stray.exists()) == (0, True)
    assert "1 file would be removed, 2.9 KiB" in result.output
    assert run("clean", states).exit_code == 0
    assert not stray.exists()
    assert len(open_dataset(states, verify=True)) == 8
    (tmp_path / "storage").mkdir()
    temporary = tmp_path / "storage" / ".a.safetensors.0123abcd.layertap-tmp"
    temporary.write_bytes(b"x")
    assert run("clean", tmp_path / "storage").exit_code == 0
    assert not temporary.exists()
    assert run("clean", tmp_path / "nothing").exit_code == 2
    assert run("clean", tmp_path / "storage", "--ttl-seconds", "-1").exit_code == 2


def in_shares(run, model, prompts):
    """Extract into `all` in two shares; returns what takes one of them again."""

    def take(share):
        options = ("--layers", "all", "--dtype", "float32", "--quiet", "--no-fsync", "--shard", f"{share}/2")
        return run("extract", model, prompts, "--out", "all", *options)

    assert [take(share).exit_code for share in range(2)] == [0, 0]
    return take


def test_shares_in_one_folder_are_verified_set_aside_and_cleaned_like_one_set(run, model, prompts, tmp_path):
    take_share = in_shares(run, model, prompts)
    result = run("verify", "all", "--sample", "8")
    assert result.exit_code == 0, result.output
    assert "all: 8 samples" in result.output
    assert json.loads(run("verify", "all", "--json").stdout)["samples"] == 8
    stray = tmp_path / "all" / "shard-1-of-2" / "shards" / "w0-000099.safetensors"
    stray.write_bytes(b"x")
    result = run("clean", "all")
    assert (result.exit_code, stray.exists()) == (0, False)
    shard = next((tmp_path / "all" / "shard-1-of-2").glob("shards/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    result = run("verify", "all", "--quarantine")
    assert result.exit_code == 3
    assert "4 samples" in result.output
    assert open_dataset(tmp_path / "all").indices.tolist() == [0, 2, 4, 6]
    assert take_share(1).exit_code == 0
    assert len(open_dataset(tmp_path / "all", verify=True)) == 8


def test_rows_that_differ_are_set_aside_in_the_share_that_has_them(run, model, prompts, tmp_path):
    in_shares(run, model, prompts)
    other = zoo.save("llama", tmp_path / "other", seed=1)
    result = run("verify", "all", "--sample", "1", "--seed", "3", "--model", other, "--quarantine")
    assert result.exit_code == 3
    (index,) = map(int, re.findall(r"all sample (\d+): .*DIFFERENT", result.output))
    left = set(open_dataset(tmp_path / "all").indices.tolist())
    assert left == set(range(8)) - set(range(index % 2, 8, 2))  # a share has one part


def test_a_share_is_not_put_where_no_reader_of_the_set_would_see_it(states, run, model, prompts):
    result = run("extract", model, prompts, "--layers", "all", "--out", states, "--shard", "0/2")
    assert result.exit_code == 2
    assert "wasn't split" in result.output
    assert not (states / "shard-0-of-2").exists()


def test_verify_recomputes_a_share_and_reports_for_machines(states, run):
    result = run("verify", states, "--recompute", "0.1%", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verdict"] == "good"
    assert report["samples"] == 8
    assert report["damaged"] == []
    (again,) = report["recomputed"]  # of eight samples at least one
    assert again["good"]
    assert again["worst"] <= again["tolerance"]
    assert len(json.loads(run("verify", states, "--recompute", "50%", "--json").stdout)["recomputed"]) == 4
    shard = next(states.glob("shards/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    result = run("verify", states, "--recompute", "1%", "--json")
    assert result.exit_code == 3
    report = json.loads(result.stdout)
    assert report["verdict"] == "bad"
    assert "checksum" in report["damaged"][0]
    for share in ("0%", "101%", "5", "many"):
        refused = run("verify", states, "--recompute", share)
        assert refused.exit_code == 2
        assert "0.1%" in refused.output
