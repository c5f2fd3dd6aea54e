"""Waiting: woken by the writer, told of its death, never for ever; several readers at once; foreign readers too."""

import fcntl
import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from file_cases import make_data, make_recorder, make_spec, write_sample

from layertap.assembly import Rows
from layertap.errors import (
    HiddenStatesError,
    MissingError,
    TargetExistsError,
    WaitTimeoutError,
    WriterDiedError,
)
from layertap.files.locks import WriterLock, is_held, read_content, wait_for_writer
from layertap.files.read import cleanup_hidden_states, load_hidden_states

fork = multiprocessing.get_context("fork")


def vllms_reader(path):
    """What vLLM's own load_hidden_states does: a blocking shared flock on the lock file, then the safetensors library."""
    with open(path + ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return safetensors.torch.load_file(path, device="cpu")


@pytest.mark.parametrize("reader", [load_hidden_states, vllms_reader])
def test_many_readers_wait_for_one_file_and_all_get_it(tmp_path, reader):
    path = tmp_path / "a.safetensors"
    spec = make_spec()
    rows, ids = make_data(spec)
    capture = make_recorder().admit(spec, request_id="r", path=path)
    results = []
    waiting = threading.Barrier(6)

    def read():
        waiting.wait()
        results.append(reader(str(path)))

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    waiting.wait()
    assert not path.exists()
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    capture.finish(ids, "prefill").result(30)
    for thread in threads:
        thread.join(30)
    assert len(results) == 5
    for result in results:
        assert result["token_ids"].tolist() == ids.tolist()
        assert result["hidden_states"].view(torch.uint8).numpy().tobytes() == rows.tobytes()
    assert os.path.exists(str(path) + ".lock")  # only cleanup and the reaper take it away


def test_a_reader_gets_the_writers_reason(tmp_path):
    path = tmp_path / "a.safetensors"
    capture = make_recorder().admit(make_spec(), request_id="r7", path=path)
    capture.fail("the client went away")
    with pytest.raises(HiddenStatesError, match="the client went away") as caught:
        load_hidden_states(path, timeout=30)
    assert (caught.value.reason, caught.value.request_id) == ("the client went away", "r7")
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors.error", "a.safetensors.lock"]


def test_a_living_writer_and_a_short_timeout(tmp_path):
    path = tmp_path / "a.safetensors"
    capture = make_recorder().admit(make_spec(), request_id="r", path=path)
    with pytest.raises(WaitTimeoutError, match="still being written after 0.05 s"):
        load_hidden_states(path, timeout=0.05)
    assert isinstance(WaitTimeoutError("x"), TimeoutError)
    capture.discard()


def test_a_path_that_nobody_writes_is_missing_at_once(tmp_path):
    with pytest.raises(MissingError, match="nobody is writing it"):
        load_hidden_states(tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError):
        load_hidden_states(tmp_path / "a.safetensors")


def _write_and_hang(path, started):
    capture = make_recorder().admit(make_spec(), request_id="victim", path=path)
    rows, ids = make_data(make_spec())
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    started.set()
    signal.pause()


def test_a_killed_writer_is_reported_not_waited_for(tmp_path):
    path = tmp_path / "a.safetensors"
    started = fork.Event()
    victim = fork.Process(target=_write_and_hang, args=(path, started))
    victim.start()
    assert started.wait(60)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with pytest.raises(WriterDiedError, match="died|ended before"):
        load_hidden_states(path, timeout=60)
    assert not path.exists()


def _fork_and_hang(path, started):
    lock = WriterLock(path, "victim")
    if os.fork() == 0:  # this child keeps the descriptor, and with it the flock
        signal.pause()
    started.set()
    signal.pause()
    lock.release()


def test_a_killed_writer_is_noticed_although_its_child_still_holds_the_lock(tmp_path):
    path = tmp_path / "a.safetensors"
    started = fork.Event()
    victim = fork.Process(target=_fork_and_hang, args=(path, started))
    victim.start()
    assert started.wait(60)
    children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    try:
        with pytest.raises(WriterDiedError, match="died before it was published"):
            load_hidden_states(path, timeout=60)
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def test_two_writers_of_one_path_the_second_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    first = WriterLock(path, "one")
    with pytest.raises(TargetExistsError, match="is being written"):
        WriterLock(path, "two", patience_seconds=0.05)
    first.release()
    second = WriterLock(path, "two")
    assert read_content(second.path).request_id == "two"
    assert is_held(second.path)
    second.release()
    assert not is_held(second.path)


def test_a_lock_that_was_removed_while_acquiring_is_taken_anew(tmp_path):
    path = tmp_path / "a.safetensors"
    first = WriterLock(path, "one")
    second = []
    thread = threading.Thread(target=lambda: second.append(WriterLock(path, "two", patience_seconds=30)))
    thread.start()
    first.remove()
    thread.join(30)
    assert is_held(second[0].path)
    second[0].release()


def test_a_reader_without_write_permission_can_wait(tmp_path):
    """Another uid may only read the lock file: a child gives up its rights to try it."""
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    os.chmod(str(path) + ".lock", 0o444)
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/") and os.stat(folder).st_uid == os.getuid():
            os.chmod(folder, 0o755)

    def read():
        if os.getuid() == 0:
            os.setuid(65534)
        wait_for_writer(path, 5)
        load_hidden_states(path, timeout=5)

    child = fork.Process(target=read)
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("suffix", [".lock", ".error"])
def test_a_pipe_that_somebody_put_there_makes_nobody_wait_for_ever(tmp_path, suffix):
    path = tmp_path / "a.safetensors"
    _, ids, _ = write_sample(make_recorder(), path, make_spec())
    path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.mkfifo(f"{path}{suffix}")
    assert load_hidden_states(path, timeout=5)["token_ids"].tolist() == ids.tolist()
    path.unlink()
    with pytest.raises(HiddenStatesError):
        load_hidden_states(path, timeout=5)


def test_the_reason_survives_in_the_lock_where_no_error_file_can_be_written(tmp_path):
    path = tmp_path / "a.safetensors"
    lock = WriterLock(path, "r")
    lock.note_error("No space left on device")
    lock.release()
    with pytest.raises(HiddenStatesError, match="No space left on device"):
        load_hidden_states(path)


def test_cleanup_removes_file_lock_and_error(tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    cleanup_hidden_states(str(path), keep_hidden_states=True)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    load_hidden_states(path)  # a missing lock is no obstacle
    cleanup_hidden_states(str(path))
    cleanup_hidden_states(str(path))  # twice is fine
    assert os.listdir(tmp_path) == []


def test_without_flock_a_reader_still_waits_and_notices_death(tmp_path, monkeypatch):
    """A file system that refuses flock (ENOLCK), as some network mounts do."""
    import errno

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "a.safetensors"
    spec = make_spec()
    rows, ids = make_data(spec)
    capture = make_recorder().admit(spec, request_id="r", path=path)
    with pytest.raises(WaitTimeoutError):
        load_hidden_states(path, timeout=0.05)
    holder = {**read_content(path.with_name("a.safetensors.lock")).holder, "pid": 2**22 - 1}
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    capture.finish(ids, "prefill").result(30)
    assert load_hidden_states(path, timeout=5)["token_ids"].tolist() == ids.tolist()
    gone = tmp_path / "b.safetensors"
    gone.with_name("b.safetensors.lock").write_text(json.dumps({"holder": holder}))
    with pytest.raises(WriterDiedError):
        load_hidden_states(gone, timeout=5)
