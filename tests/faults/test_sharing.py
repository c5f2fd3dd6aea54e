"""Users of one folder in each other's way: servers, writers of one name, endless readers, forks, interrupts, clocks."""

import os
import random
import signal
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import kill_server
import pytest
from file_cases import make_data, make_recorder, make_spec, write_sample
from victims import Figures, Victim, WarmModel, fork, prompts

from layertap.assembly import Rows
from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, LayertapError, TargetExistsError, WaitTimeoutError
from layertap.files.locks import WriterLock
from layertap.files.read import read_file
from layertap.files.reap import reap

SPEC = make_spec(num_rows=30, hidden_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return WarmModel(tmp_path_factory.mktemp("warm"))


def add_all(capture, rows, ids):
    for start in range(0, len(ids), 10):
        part = slice(start, start + 10)
        capture.add(Rows(0, start, ids[part], slice(0, 2), rows[part]))
    capture.finish(ids, "prefill")


def ask(url, seed, count):
    """Ask for greedy answers under ids that both servers are given; what was told."""
    told, rng = [], random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(count):
            (prompt,) = prompts(rng, 1)
            answer = http.post(
                "/v1/completions", headers={"X-Request-Id": f"same-{seed}-{number}"},
                json={"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0.0, "return_token_ids": True,
                      "kv_transfer_params": {"tag": f"tag-{seed}-{number}"}},
            )  # fmt: skip
            if answer.status_code != 200:
                assert answer.status_code in (400, 409), answer.text
                assert "taken" in answer.text or "exist" in answer.text or "being written" in answer.text
                continue
            (choice,) = answer.json()["choices"]
            told.append(
                {"path": choice["kv_transfer_params"]["hidden_states_path"], "tokens": choice["prompt_token_ids"]}
            )
    return told


@pytest.mark.slow
def test_two_servers_on_one_folder_never_mix_up_or_remove_each_others_files(model, tmp_path):
    started = [kill_server._start(model, tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, url, seed, 8) for seed in range(2) for _, url in started]
        told = [entry for future in asked for entry in future.result()]
    for victim, _ in started:
        os.kill(victim.process.pid, signal.SIGTERM)
        victim.join()
    assert len(told) == 16  # of two requests with one tag one is served
    assert len({entry["path"] for entry in told}) == 16
    figures = Figures()
    kill_server._look(model, tmp_path, told, figures)
    assert figures.faultless, figures
    assert figures.complete >= 16


def test_of_many_writers_of_one_name_one_wins_and_the_others_are_told(tmp_path):
    recorder = make_recorder(num_writer_threads=4)
    together = threading.Barrier(6)

    def race(number):
        won = []
        for name in range(20):
            rows, ids = make_data(SPEC, seed=number)
            together.wait()
            try:
                capture = recorder.admit(SPEC, request_id=f"{number}", path=tmp_path / f"{name}.safetensors")
            except TargetExistsError:
                together.wait()
                continue
            together.wait()  # hold the name until everybody has tried
            add_all(capture, rows, ids)
            capture.result.result(30)
            won.append(name)
        return won

    with ThreadPoolExecutor(6) as pool, pytest.MonkeyPatch.context() as patched:
        # who is refused needn't wait five seconds for that
        patched.setattr(WriterLock.__init__, "__kwdefaults__", {"patience_seconds": 0.0, "replaces": False})
        won = list(pool.map(race, range(6)))
    assert sorted(name for names in won for name in names) == list(range(20))
    for number, names in enumerate(won):
        for name in names:
            rows, _ = make_data(SPEC, seed=number)
            assert read_file(tmp_path / f"{name}.safetensors").rows.tobytes() == rows.tobytes()
    recorder.close()


def test_a_reader_that_never_lets_go_stops_neither_the_reaper_nor_other_readers_nor_new_names(tmp_path):
    recorder = make_recorder()
    rows, _, _ = write_sample(recorder, tmp_path / "a.safetensors", SPEC)
    started = fork.Event()

    def hold():
        import fcntl

        for name in ("a.safetensors", "a.safetensors.lock"):
            fcntl.flock(os.open(tmp_path / name, os.O_RDONLY), fcntl.LOCK_SH)
        started.set()
        signal.pause()

    victim = Victim(hold)
    started.wait()
    assert read_file(tmp_path / "a.safetensors", timeout=5).rows.tobytes() == rows.tobytes()
    write_sample(recorder, tmp_path / "b.safetensors", SPEC, seed=1)
    reap(tmp_path, ttl_seconds=1e-9)
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors"))] == ["a.safetensors"]  # it is being read
    victim.kill()
    victim.join()
    reap(tmp_path, ttl_seconds=1e-9)
    assert not list(tmp_path.iterdir())
    recorder.close()


@pytest.mark.slow
def test_a_client_that_stops_reading_a_download_holds_up_nobody_and_not_the_servers_end(model, tmp_path):
    big = make_spec(num_rows=4000, hidden_size=1024)
    write_sample(make_recorder(), tmp_path / "big.safetensors", big, request_id="big")
    victim, url = kill_server._start(model, tmp_path)
    host, port = url.removeprefix("http://").split(":")
    stalled = []
    for _ in range(20):
        one = socket.create_connection((host, int(port)))
        one.sendall(b"GET /v1/hidden_states/big HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.recv(64).startswith(b"HTTP/1.1 200"), "the download began"
        stalled.append(one)
    with HiddenStatesClient(url, timeout=60) as states:
        answer = states.complete([9, 10, 11], model="tiny", max_tokens=3, temperature=0.0)
        assert model.right(states.fetch(answer["choices"][0])["hidden_states"], [9, 10, 11])
    for one in stalled:
        one.close()
    os.kill(victim.process.pid, signal.SIGTERM)
    victim.process.join(60)
    assert not victim.process.is_alive()


def test_forks_while_captures_run_change_nothing(tmp_path):
    recorder = make_recorder(num_writer_threads=3)
    captures = []
    for number in range(30):
        rows, ids = make_data(SPEC, seed=number)
        capture = recorder.admit(SPEC, request_id=str(number), path=tmp_path / f"{number}.safetensors")
        captures.append((capture, rows, ids))
        capture.add(Rows(0, 0, ids[:10], slice(0, 2), rows[:10]))
        if number % 5 == 0:
            child = os.fork()
            if child == 0:  # has copies of every lock and descriptor, and a corridor of its own
                try:
                    own = make_recorder()
                    write_sample(own, tmp_path / f"child-{number}.safetensors", SPEC, seed=number)
                    own.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            written, _ = make_data(SPEC, seed=number)
            assert read_file(tmp_path / f"child-{number}.safetensors").rows.tobytes() == written.tobytes()
    for capture, rows, ids in captures:
        for start in (10, 20):
            part = slice(start, start + 10)
            capture.add(Rows(0, start, ids[part], slice(0, 2), rows[part]))
        capture.finish(ids, "prefill")
    for capture, rows, _ in captures:
        assert read_file(capture.path, timeout=20).rows.tobytes() == rows.tobytes()
    recorder.close()


class Interrupted(BaseException):
    """What a signal's handler raises, as Ctrl-C's KeyboardInterrupt is."""


class InterruptAt:
    """Raise at the n-th call of this thread inside layertap, as a function begins or one of C has ended: there signals arrive."""

    def __init__(self, nth):
        self.left = nth
        self.where = ""

    def __call__(self, frame, event, _arg):
        if event in ("call", "c_return") and "/layertap/" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise Interrupted


def test_an_interrupt_at_any_call_leaves_a_file_or_a_reason_and_a_working_writer(tmp_path):
    recorder = make_recorder(num_writer_threads=2, max_bytes_in_flight=1 << 16)
    rows, ids = make_data(SPEC)
    outcomes = Counter()
    nth, tracer = 0, InterruptAt(0)
    while tracer.left <= 0:  # until one came through
        nth += 1
        path, capture = tmp_path / f"{nth}.safetensors", None
        tracer = InterruptAt(nth)
        sys.setprofile(tracer)
        try:
            capture = recorder.admit(SPEC, request_id=str(nth), path=path)
            add_all(capture, rows, ids)
        except Interrupted:
            sys.setprofile(None)
            if capture is not None:
                capture.fail("interrupted")
        finally:
            sys.setprofile(None)
        if capture is None:
            continue  # nobody was told of it
        try:
            assert read_file(path, timeout=20).rows.tobytes() == rows.tobytes()
            outcomes["right"] += 1
        except WaitTimeoutError:
            raise AssertionError(f"an interrupt at {tracer.where} makes its reader wait for ever") from None
        except HiddenStatesError:
            outcomes["told"] += 1
    write_sample(recorder, tmp_path / "after.safetensors", SPEC)
    assert read_file(tmp_path / "after.safetensors").rows.tobytes() == rows.tobytes()
    recorder.close()
    assert outcomes["told"] > 30, outcomes


def test_a_failure_is_told_whatever_the_clocks_say(tmp_path, monkeypatch):
    """The old file is from the future: the clock was ahead when it was written."""
    import time

    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 4e9))
    for use_lock in (True, False):
        path, recorder = tmp_path / f"{use_lock}.safetensors", make_recorder(use_synchronization_lock=use_lock)
        old, _, _ = write_sample(recorder, path, SPEC)
        os.utime(path, (4e9, 4e9))
        assert read_file(path).rows.tobytes() == old.tobytes()
        capture = recorder.admit(SPEC, request_id="second", path=path, overwrite=True)
        capture.fail("the model fell over")
        recorder.close()
        with pytest.raises(LayertapError, match="fell over"):
            read_file(path, timeout=5)
        new, _, _ = write_sample(make_recorder(), path, SPEC, seed=3, overwrite=True)
        os.utime(path, (1, 1))
        assert read_file(path).rows.tobytes() == new.tobytes()
