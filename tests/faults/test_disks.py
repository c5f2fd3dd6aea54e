"""Every call to the disk fails once, in every way; disks that are slow or write little at a time; memory that runs out.

Whatever happens, a reader gets the rows that were written or a reason, memory stays bounded, and no other request suffers.
"""

import errno
import os
import resource
import shutil
import threading

import numpy as np
import pytest
from file_cases import make_data, make_recorder, make_spec, write_sample
from victims import Victim

from layertap.assembly import Rows
from layertap.errors import HiddenStatesError, WaitTimeoutError
from layertap.files.read import read_file

SPEC = make_spec(num_rows=24, hidden_size=16)
CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "unlink", "replace", "close")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EDQUOT)


class OneFailure:
    """The n-th call of `name` below a folder fails; counts the calls. Descriptors are known by where they point."""

    def __init__(self, monkeypatch, folder, name, nth, number):
        self.calls = 0
        real = getattr(os, name)

        def call(what, *args, **kwargs):
            where = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
            if str(where).startswith(str(folder)):
                self.calls += 1
                if self.calls == nth:
                    if name == "close":
                        real(what)
                    raise OSError(number, os.strerror(number), str(where))
            return real(what, *args, **kwargs)

        monkeypatch.setattr(os, name, call)


def outcome(path, rows):
    """What a reader gets; anything but the rows or a reason fails the test."""
    try:
        loaded = read_file(path, timeout=20)
    except WaitTimeoutError:
        raise AssertionError("the reader hangs") from None
    except (HiddenStatesError, OSError) as exc:  # OSError: it was the reader's own call that failed
        assert str(path) in str(exc)
        return "told"
    assert loaded.rows.tobytes() == rows.tobytes()
    return "right"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_each_call_that_fails_costs_its_own_request_at_most(tmp_path, monkeypatch, name, overwrite):
    seen = set()
    for nth in range(1, 40):
        number = ERRORS[nth % len(ERRORS)]
        folder = tmp_path / str(nth)
        folder.mkdir()
        path = folder / "a.safetensors"
        recorder = make_recorder(fsync=True)
        if overwrite:
            write_sample(recorder, path, SPEC, seed=9)
        rows, ids = make_data(SPEC)
        with monkeypatch.context() as patched:
            fault = OneFailure(patched, folder, name, nth, number)
            try:
                capture = recorder.admit(SPEC, request_id="r", path=path, overwrite=overwrite)
            except OSError:
                seen.add("refused")
            else:
                for start in range(0, 24, 8):
                    part = slice(start, start + 8)
                    capture.add(Rows(0, start, ids[part], slice(0, 2), rows[part]))
                capture.finish(ids, "prefill").exception(30)
                failed = capture.result.exception() is not None
                got = outcome(path, rows)
                assert got == "told" or not failed
                seen.add(got)
        good, _, _ = write_sample(recorder, folder / "b.safetensors", SPEC, seed=1)
        assert outcome(folder / "b.safetensors", good) == "right"
        recorder.close()
        assert recorder.budget.in_flight_bytes == 0
        if fault.calls < nth:
            break
    assert nth < 39
    assert "right" in seen


def test_a_folder_that_vanishes_under_a_capture_costs_that_capture_and_is_made_anew(tmp_path):
    folder, recorder = tmp_path / "gone", make_recorder()
    rows, ids = make_data(SPEC)
    capture = recorder.admit(SPEC, request_id="r", path=folder / "a.safetensors")
    capture.add(Rows(0, 0, ids[:8], slice(0, 2), rows[:8]))
    shutil.rmtree(folder)
    capture.add(Rows(0, 8, ids[8:], slice(0, 2), rows[8:]))
    assert "No such file" in str(capture.finish(ids, "prefill").exception(30))
    assert outcome(folder / "a.safetensors", rows) == "told"
    good, _, _ = write_sample(recorder, folder / "b.safetensors", SPEC, seed=1)
    assert outcome(folder / "b.safetensors", good) == "right"
    recorder.close()
    assert recorder.budget.in_flight_bytes == 0


def test_a_slow_disk_makes_the_engine_wait_and_memory_stays_bounded(tmp_path, monkeypatch):
    gate, waiting = threading.Event(), threading.Event()
    real = os.pwrite

    def slow(fd, data, offset):
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}") and len(data) != 4096:  # 4096: the lock's content
            waiting.set()
            gate.wait()
        return real(fd, data, offset)

    spec = make_spec(num_rows=400, hidden_size=64)
    rows, ids = make_data(spec)
    chunk_bytes = rows[:10].nbytes
    recorder = make_recorder(max_bytes_in_flight=3 * chunk_bytes, num_writer_threads=2)
    monkeypatch.setattr(os, "pwrite", slow)
    path = tmp_path / "a.safetensors"
    capture = recorder.admit(spec, request_id="r", path=path)

    def engine():
        for start in range(0, 400, 10):
            capture.add(Rows(0, start, ids[start : start + 10], slice(0, 2), rows[start : start + 10]))
        capture.finish(ids, "prefill")

    thread = threading.Thread(target=engine)
    thread.start()
    assert waiting.wait(30)
    with pytest.raises(WaitTimeoutError, match="still being written"):
        read_file(path, timeout=0.05)
    assert recorder.budget.in_flight_bytes <= 3 * chunk_bytes
    gate.set()
    thread.join(60)
    assert outcome(path, rows) == "right"
    assert recorder.budget.peak_bytes <= 3 * chunk_bytes
    recorder.close()


def test_a_disk_that_takes_few_bytes_at_a_time_gives_the_same_file(tmp_path, monkeypatch):
    rows, _, _ = write_sample(make_recorder(), tmp_path / "whole.safetensors", SPEC, request_id="r")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:37], offset))
    write_sample(make_recorder(), tmp_path / "bits.safetensors", SPEC, request_id="r")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "bits.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["empty", "zeros", "ascontiguousarray"])
def test_memory_that_runs_out_at_any_allocation_costs_one_request(tmp_path, monkeypatch, name):
    real, told = getattr(np, name), 0
    for nth in range(1, 60):
        calls = 0
        recorder = make_recorder()
        rows, ids = make_data(SPEC)
        path = tmp_path / f"{nth}.safetensors"

        def allocate(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth:  # noqa: B023 - called in this round only
                raise MemoryError("made to fail")
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(np, name, allocate)
            try:
                capture = recorder.admit(SPEC, request_id="r", path=path)
                for start in range(0, 24, 8):
                    part = slice(start, start + 8)
                    capture.add(Rows(0, start, ids[part], slice(0, 2), rows[part]))
                capture.finish(ids, "prefill").exception(30)
            except MemoryError:
                capture = None
            failed = capture is None or capture.result.exception() is not None
        if not failed:
            assert outcome(path, rows) == "right"
        elif capture is not None:
            assert outcome(path, rows) == "told"
        else:
            assert not list(tmp_path.glob(f"{nth}.*"))  # nobody was told the path; nothing may make its next user wait
        told += failed
        recorder.close()
        assert recorder.budget.in_flight_bytes == 0
        if calls < nth:
            break
    assert nth < 59
    assert told >= 1


def _fill_memory(folder, pipe):
    """Write with an address space that has room for little more than what is there."""
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")  # noqa: SIM115
    recorder = make_recorder(num_writer_threads=2, max_bytes_in_flight=1 << 40)
    spec = make_spec(num_rows=2000, hidden_size=1024)
    rows, ids = make_data(spec)
    resource.setrlimit(resource.RLIMIT_AS, (used + rows.nbytes + (60 << 20),) * 2)
    for number in range(12):
        try:
            capture = recorder.admit(spec, request_id=str(number), path=folder / f"{number}.safetensors")
            for layer in range(2):  # parts of rows, so that they are copied and read back
                capture.add(Rows(0, 0, ids, slice(layer, layer + 1), rows[:, layer : layer + 1]))
            capture.finish(ids, "prefill").exception(60)
        except (MemoryError, OSError, RuntimeError) as exc:
            os.write(pipe, f"refused {number}: {exc}\n".encode())
            continue
        os.write(pipe, f"ended {number}\n".encode())


def test_under_a_hard_limit_of_memory_readers_get_the_file_or_a_reason(tmp_path):
    read_end, write_end = os.pipe()
    victim = Victim(_fill_memory, tmp_path, write_end)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        ended = list(lines)
    victim.join()
    assert len(ended) == 12, ended
    rows, _ = make_data(make_spec(num_rows=2000, hidden_size=1024))
    got = [outcome(path.with_suffix(""), rows) for path in sorted(tmp_path.glob("*.safetensors.lock"))]
    assert len(got) == sum(line.startswith("ended") for line in ended)
