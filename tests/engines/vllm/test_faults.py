"""Disks that are full, folders that can't be written to, a writer process that dies: the engine goes on, every reader is told."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import checkpoints
import pytest
import running
from running import check_file, params, prompts

from layertap import load_hidden_states
from layertap.engines.vllm.orders import OrderDesk
from layertap.errors import HiddenStatesError
from layertap.files.locks import WriterLock
from layertap.files.paths import temporary_path

KILLS = Path(__file__).parents[2] / "faults" / "kills.py"


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)  # the engine may still have it open


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read-only")  # root may write into any folder of a writable file system
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting a read-only file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    os.environ["LAYERTAP_VLLM_WRITER"] = "process"
    states = tmp_path_factory.mktemp("states")
    temporary_path(states / "of-a-killed-engine.safetensors").write_bytes(b"half")
    try:
        with running.running(
            checkpoint,
            states,
            {"allow_custom_save_path": True, "min_free_bytes": 0, "num_writer_processes": 1},
            block_size=32,
        ) as engine:
            yield engine
    finally:
        del os.environ["LAYERTAP_VLLM_WRITER"]


def generate(llm, inputs, sampling):
    return llm.generate(inputs, sampling, use_tqdm=False)


def test_what_a_killed_engine_left_half_written_goes_with_the_next_start(llm, checkpoint):
    check_a_good_one(llm, checkpoint, 12)  # the writer process is up
    output = generate(llm, prompts([9], seed=13), params(1))[0]
    folder = Path(output.kv_transfer_params["hidden_states_path"]).parent
    wait_until(lambda: not list(folder.glob(".of-a-killed-engine*")))


def test_a_full_disk_fails_the_requests_it_hits_and_no_other(llm, checkpoint, small_disk):
    model = running.load_oracle("llama", checkpoint)
    asked = prompts([200] * 6, seed=1)
    outputs = generate(
        llm, asked, [params(2, hidden_states_path=str(small_disk / f"{i}.safetensors")) for i in range(len(asked))]
    )
    reasons = []
    for output in outputs:
        try:
            load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=30)
        except HiddenStatesError as exc:
            reasons.append(str(exc))
    assert reasons
    assert all("No space left" in reason or "no room" in reason for reason in reasons)
    wait_until(lambda: failures("disk") == len(reasons))
    good = generate(llm, prompts([30], seed=2), params(4, include_output_tokens=True))[0]
    tokens = [*good.prompt_token_ids, *good.outputs[0].token_ids]
    check_file(model, good.kv_transfer_params["hidden_states_path"], tokens[:-1])


def check_a_good_one(llm, checkpoint, seed):
    """The engine goes on."""
    good = generate(llm, prompts([30], seed=seed), params(4, include_output_tokens=True))[0]
    tokens = [*good.prompt_token_ids, *good.outputs[0].token_ids]
    check_file(running.load_oracle("llama", checkpoint), good.kv_transfer_params["hidden_states_path"], tokens[:-1])


def failures(reason):
    from layertap.engines.vllm import worker

    (tap,) = worker._taps.values()
    return tap.counts().get(f"failures.{reason}", 0)


def wait_until(condition):
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("waited in vain")


def test_a_read_only_folder_fails_the_requests_that_write_there(llm, checkpoint, read_only):
    before = failures("disk")
    outputs = generate(
        llm,
        prompts([20, 20], seed=5),
        [params(3, hidden_states_path=str(read_only / "x.safetensors")), params(3)],
    )
    path = outputs[0].kv_transfer_params["hidden_states_path"]
    assert path == str(read_only / "x.safetensors")
    with pytest.raises(HiddenStatesError):  # nobody could leave the reason there
        load_hidden_states(path, timeout=30)
    check_file(
        running.load_oracle("llama", checkpoint),
        outputs[1].kv_transfer_params["hidden_states_path"],
        outputs[1].prompt_token_ids,
    )
    wait_until(lambda: failures("disk") == before + 1)


def test_a_folder_that_is_deleted_under_a_running_request_fails_that_request(llm, checkpoint, tmp_path):
    folder = tmp_path / "doomed"
    target = folder / "x.safetensors"
    before = failures("disk")
    engine = llm.llm_engine
    engine.add_request(
        "doomed", prompts([20], seed=6)[0], params(40, include_output_tokens=True, hidden_states_path=str(target))
    )
    for _ in range(3):
        engine.step()
    assert (folder / "x.safetensors.lock").exists()
    shutil.rmtree(folder)
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(HiddenStatesError):
        load_hidden_states(target, timeout=30)
    wait_until(lambda: failures("disk") == before + 1)
    check_a_good_one(llm, checkpoint, 7)


def test_the_storage_itself_may_be_deleted_and_the_next_request_makes_it_anew(llm, checkpoint):
    path = generate(llm, prompts([9], seed=8), params(2))[0].kv_transfer_params["hidden_states_path"]
    load_hidden_states(path, timeout=30)
    shutil.rmtree(os.path.dirname(path))
    check_a_good_one(llm, checkpoint, 9)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "being-written"])
def test_a_path_that_became_anothers_after_the_check_is_not_handed_out(
    llm, checkpoint, tmp_path, monkeypatch, finished
):
    target = tmp_path / "contested.safetensors"
    before = failures("exists")
    reserve, held = OrderDesk.reserve_tag, []

    def somebody_is_faster(self, order, choices=1):
        # called right behind the check
        if finished:
            target.write_bytes(b"somebody else's")
        else:
            held.append(WriterLock(target, "theirs"))
        reserve(self, order, choices)

    monkeypatch.setattr(OrderDesk, "reserve_tag", somebody_is_faster)
    output = generate(llm, prompts([20], seed=10), params(3, hidden_states_path=str(target)))[0]
    monkeypatch.undo()
    assert list(output.kv_transfer_params) == ["hidden_states_error"]
    assert "another" in output.kv_transfer_params["hidden_states_error"]
    wait_until(lambda: failures("exists") == before + 1)
    if finished:
        assert target.read_bytes() == b"somebody else's"
    assert not target.with_name("contested.safetensors.error").exists()
    for theirs in held:
        theirs.remove()
    check_a_good_one(llm, checkpoint, 11)


def test_kills_and_bad_disks_cost_their_own_requests_and_every_reader_gets_right_rows_or_a_reason():
    """In a process of its own: an engine that has computed has threads of OpenMP, for which a fork of it would wait."""
    command = [sys.executable, str(KILLS), "--only", "vllm", "--rounds", "10", "--seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["victim"], figures["rounds"]) == ("vllm all", 10)
    assert figures["wrong"] == figures["hung"] == figures["left_behind"] == 0
    assert figures["complete"] + figures["told"] == figures["admitted"] > 0


def test_a_dead_writer_process_is_told_to_readers_and_the_engine_goes_on(llm, tmp_path):
    from layertap.engines.vllm import worker

    (tap,) = worker._taps.values()
    engine = llm.llm_engine
    target = tmp_path / "killed.safetensors"
    engine.add_request(
        "killed", prompts([20], seed=3)[0], params(40, include_output_tokens=True, hidden_states_path=str(target))
    )
    for _ in range(3):
        engine.step()
    os.kill(tap.unpacker.pid, signal.SIGKILL)
    tap.unpacker._receiver.join(30)
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(HiddenStatesError, match="died"):
        load_hidden_states(target, timeout=30)
    after = generate(llm, prompts([9], seed=4), params(2))[0]
    assert len(after.outputs[0].token_ids) == 2
    assert failures("engine") == 2
    with pytest.raises(HiddenStatesError, match="died"):
        load_hidden_states(after.kv_transfer_params["hidden_states_path"], timeout=30)
    assert tap.tap.host_ring.used == 0
