"""What is found wrong is kept aside, where no reader and no run takes it for good, with its reason; nothing is deleted."""

import fcntl
import json
import os
import sys

import numpy as np
import pytest
from file_cases import make_data, make_recorder, make_spec, write_sample
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from layertap import LLM, HiddenStatesError, SamplingParams, load_hidden_states, open_dataset
from layertap.assembly import Rows
from layertap.cli.app import make_app
from layertap.engines.transformers.row_tap import _Group
from layertap.errors import EngineError, TargetExistsError
from layertap.files.locks import WriterLock
from layertap.files.publish import set_aside
from layertap.files.read import read_file
from layertap.files.reap import reap
from layertap.testing import zoo
from layertap.writing.checks import FinalCheck

SPEC = make_spec(num_rows=12, hidden_size=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    def command(*words):
        monkeypatch.setattr(sys, "argv", ["layertap", *map(str, words)])
        return CliRunner().invoke(make_app(), [str(word) for word in words])

    monkeypatch.setenv("TQDM_DISABLE", "1")
    return command


def kept(folder):
    return sorted(folder.glob("*.quarantined"))


def fail_a_check(recorder, path, name="r", check=None, **admit):
    rows, ids = make_data(SPEC, seed=5)
    rows = rows.copy()
    if check is None:
        rows[7, 1, :4] = 0xFF
    capture = recorder.admit(SPEC, request_id=name, path=path, **admit)
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    with pytest.raises(EngineError):
        capture.finish(ids, "prefill", check=check).result(30)
    return rows


@pytest.mark.parametrize("check", [None, FinalCheck(range(2, 5), lambda rows: "they are wrong")], ids=["rows", "final"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_rows_that_fail_a_check_are_kept_aside_and_their_reader_is_told_where(tmp_path, check, overwrite):
    path, recorder = tmp_path / "a.safetensors", make_recorder(shared_storage_path=str(tmp_path))
    if overwrite:
        write_sample(recorder, path, SPEC)
    recorder.room.recount()
    rows = fail_a_check(recorder, path, check=check, overwrite=overwrite)
    (aside,) = kept(tmp_path)
    reason = "wrong" if check else "position 7, layer 1"
    with pytest.raises(HiddenStatesError, match=f"{reason}.*kept as {aside.name}"):
        load_hidden_states(path, timeout=10)
    with pytest.raises(HiddenStatesError, match=f"in quarantine.*{reason}"):
        read_file(aside)
    with safe_open(aside, "np") as file:
        np.testing.assert_array_equal(file.get_tensor("hidden_states"), rows.view(np.float32))
    assert (recorder.counts.quarantined, recorder.counts.failed) == (1, 1)
    used = recorder.room.used_bytes
    assert abs(used - recorder.room.recount()) < 20_000  # headers and reasons aren't counted
    assert not list(tmp_path.glob(".*"))


def test_a_fault_that_hits_every_request_fills_no_disk(tmp_path):
    recorder = make_recorder()
    for number in range(20):
        fail_a_check(recorder, tmp_path / f"{number}.safetensors", str(number))
    assert len(kept(tmp_path)) == recorder.counts.quarantined == 16
    with pytest.raises(HiddenStatesError, match=r"position 7, layer 1[^;]*$"):
        load_hidden_states(tmp_path / "19.safetensors")


def test_what_is_kept_survives_the_next_request_of_its_path_the_reaper_and_the_next_failure(tmp_path):
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    fail_a_check(recorder, path)
    fail_a_check(recorder, path)
    rows, _, _ = write_sample(recorder, path, SPEC)
    reap(tmp_path, ttl_seconds=1e-9, now=9e9)
    assert not path.exists()
    write_sample(recorder, path, SPEC)
    assert read_file(path).rows.tobytes() == rows.tobytes()
    assert len(kept(tmp_path)) == 2
    for aside in kept(tmp_path):
        with pytest.raises(HiddenStatesError, match="position 7, layer 1"):
            load_hidden_states(aside)


def test_generation_that_differs_from_its_spot_check_is_kept_aside(checkpoint, tmp_path, monkeypatch):
    real = _Group._rows
    params = SamplingParams(
        max_tokens=6, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": {"include_output_tokens": True}}
    )
    with LLM(checkpoint, layers=[1, 3], storage=tmp_path, spot_check=1) as llm:
        llm.generate([{"prompt_token_ids": [9, 10]}], params, use_tqdm=False)  # right without the fault
        monkeypatch.setattr(_Group, "_rows", lambda self, hidden: real(self, hidden.roll(1, dims=0)))
        (output,) = llm.generate([{"prompt_token_ids": [9, 10, 11, 12, 13]}], params, use_tqdm=False)
        path = output.kv_transfer_params["hidden_states_path"]
        with pytest.raises(HiddenStatesError, match="other rows.*kept as"):
            load_hidden_states(path, timeout=30)
    (aside,) = kept(tmp_path)
    assert load_file(aside)["token_ids"].tolist()[:5] == [9, 10, 11, 12, 13]


@pytest.fixture
def file(checkpoint, tmp_path):
    with LLM(checkpoint, layers=[1, 3], storage=tmp_path) as llm:
        params = SamplingParams(max_tokens=1)
        (output,) = llm.generate([{"prompt_token_ids": [9, 10, 11, 12]}], params, use_tqdm=False)
        path = output.kv_transfer_params["hidden_states_path"]
        load_hidden_states(path)
    return tmp_path / path


def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def test_a_published_file_found_damaged_is_moved_only_if_asked(file, run):
    flip(file)
    assert run("verify", file).exit_code == 1
    assert file.exists()
    done = run("verify", file, "--quarantine")
    assert done.exit_code == 3, done.output
    (aside,) = kept(file.parent)
    assert aside.name in done.output
    with pytest.raises(HiddenStatesError, match=f"checksums.*kept as {aside.name}"):
        load_hidden_states(file)
    assert "1 files were found wrong" in run("doctor", "none", "--storage", file.parent).output


def test_a_published_file_whose_rows_are_another_models_is_moved(file, run, tmp_path_factory):
    other = zoo.save("llama", tmp_path_factory.mktemp("other"), seed=1)
    done = run("verify", file, "--quarantine", "--json")
    assert (done.exit_code, kept(file.parent)) == (0, [])  # nothing is wrong
    done = run("verify", file, "--model", other, "--quarantine", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["quarantined"] == [str(kept(file.parent)[0])]
    with pytest.raises(HiddenStatesError, match="computed again with .*other.* DIFFERENT"):
        load_hidden_states(file)


def test_a_file_that_was_replaced_or_is_being_written_is_left_alone(tmp_path):
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    write_sample(recorder, path, SPEC)
    checked = path.stat()
    rows, _, _ = write_sample(recorder, path, make_spec(num_rows=3), seed=1, overwrite=True)
    with pytest.raises(TargetExistsError, match="another file than the one that was checked"):
        set_aside(path, "wrong", checked)
    lock = WriterLock(path, "next", replaces=True)
    with pytest.raises(TargetExistsError, match="is being written"):
        set_aside(path, "wrong", path.stat())
    lock.note_replaced()
    lock.remove()
    assert read_file(path).rows.tobytes() == rows.tobytes()
    assert not kept(tmp_path)


def test_a_reader_that_looks_at_the_lock_doesnt_save_a_wrong_file_from_quarantine(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, SPEC)
    reader = os.open(f"{path}.lock", os.O_RDWR)
    real = fcntl.flock
    real(reader, fcntl.LOCK_SH)

    def flock(fd, operation):
        try:
            return real(fd, operation)
        except BlockingIOError:
            if operation & fcntl.LOCK_EX:  # its look is over
                real(reader, fcntl.LOCK_UN)
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    aside = set_aside(path, "they are wrong", path.stat())
    os.close(reader)
    assert kept(tmp_path) == [aside]


def test_a_foreign_file_and_a_missing_one_are_left_alone(tmp_path, run):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("a text that is no file of hidden states" * 100)
    assert run("verify", foreign, "--quarantine").exit_code == 1
    assert foreign.exists()
    assert run("verify", tmp_path / "none", "--quarantine").exit_code == 1


@pytest.fixture
def states(checkpoint, tmp_path, run):
    lines = [json.dumps({"prompt": f"text number {i} of the set"}) for i in range(6)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = (
        "extract",
        checkpoint,
        tmp_path / "in.jsonl",
        "--layers",
        "1,3",
        "--out",
        tmp_path / "states",
        "--shard-size",
        "16K",
    )
    done = run(*words)
    assert done.exit_code == 0, done.output
    return tmp_path / "states", words


@pytest.mark.parametrize("how", ["damaged", "different"])
def test_parts_of_a_data_set_that_are_wrong_are_moved_and_made_anew_by_the_next_run(states, run, how, tmp_path_factory):
    folder, words = states
    whole = [item["hidden_states"] for item in open_dataset(folder)]
    shards = len(list(folder.glob("shards/*.safetensors")))
    assert shards > 1
    if how == "damaged":
        flip(next(folder.glob("shards/*.safetensors")))
        done = run("verify", folder, "--quarantine")
    else:
        other = zoo.save("llama", tmp_path_factory.mktemp("other"), seed=1)
        done = run("verify", folder, "--model", other, "--sample", "1", "--quarantine")
    assert done.exit_code == 3, done.output
    assert "moved aside" in done.output
    left = open_dataset(folder, verify=True)
    assert 0 < len(left) < 6
    (aside,) = (folder / "damaged").iterdir()
    assert ("checksum" if how == "damaged" else "DIFFERENT") in (aside / "reason.txt").read_text()
    assert len(list(aside.glob("*.safetensors"))) == len(list(aside.glob("*.index.parquet"))) == 1
    again = run(*words)
    assert again.exit_code == 0, again.output
    assert run("verify", folder).exit_code == 0
    assert all((a["hidden_states"] == b).all() for a, b in zip(open_dataset(folder), whole, strict=True))
    assert aside.exists()


def test_nothing_is_moved_out_of_a_set_that_a_job_is_writing(states, run):
    folder, _ = states
    flip(next(folder.glob("shards/*.safetensors")))
    lock = WriterLock(folder / ".writer", None)
    assert run("verify", folder, "--quarantine").exit_code == 1
    lock.remove()
    assert not (folder / "damaged").exists()
