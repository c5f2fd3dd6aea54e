"""Several writer processes of one engine: who has a request is who publishes it, and one that dies costs only its own."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from file_cases import make_data
from test_remote import PATIENCE_SECONDS, SPEC, Handing, ended
from writer_cases import writer_setup

from layertap import load_hidden_states
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.vllm.compat import Layout
from layertap.engines.vllm.configured import num_writers
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.tap import Step, Tap
from layertap.engines.vllm.worker import WorkerTap
from layertap.engines.vllm.writers import start_writers
from layertap.errors import HiddenStatesError, OptionError
from layertap.files.read import read_file


class Blocking(Step):
    """A step whose copy is long in coming, without rows."""

    gate = threading.Event()

    def __init__(self, handing):
        super().__init__(
            0, [], handing.ring.array[:0], lambda: None, torch.zeros((2, 0)), 0, handing.ring.stamps[:0], 1
        )

    def wait(self):
        self.gate.wait(PATIENCE_SECONDS)


def wait_for_pids(handing):
    writers = handing.collector.all
    handing.wait_until(lambda: all(writer.pid is not None for writer in writers))
    return [writer.pid for writer in writers]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    handing = Handing(tmp_path_factory.mktemp("states"), 3)
    yield handing
    handing.collector.close()


def test_requests_are_spread_and_every_file_is_right(three):
    names = [(f"spread-{i}", i) for i in range(7)]
    paths = [three.order(name) for name, _ in names]
    three.collector.wait_for_admissions(PATIENCE_SECONDS)
    # each step has a part of every request: single rows, which are gathered, then several
    released = three.num_released
    three.step_of(names, 0, 1)
    three.step_of(names, 1, 2)
    three.step_of(names[::-1], 2, 5)
    three.step_of(names, 5)
    for name, seed in names:
        three.finish(name, seed)
    for path, (_, seed) in zip(paths, names, strict=True):
        rows, ids = make_data(SPEC, seed=seed)
        loaded = read_file(path, timeout=PATIENCE_SECONDS)
        assert np.array_equal(loaded.rows, rows)
        assert loaded.token_ids.tolist() == ids.tolist()
    three.wait_until(lambda: three.num_released == released + 4)
    three.wait_until(lambda: three.collector.counts().get("files") == 7)
    assert sorted(writer.counts()["files"] for writer in three.collector.all) == [2, 2, 3]
    assert three.collector.counts()["rows"] == 7 * SPEC.prompt_len


def test_rows_that_another_writer_has_published_for_other_tokens_are_refused(three):
    three.order("owner"), three.order("thief")
    three.collector.wait_for_admissions(PATIENCE_SECONDS)
    assert three.collector._of["owner"] != three.collector._of["thief"]
    three.step("owner", 20)
    three.finish("owner", 20)
    read_file(three.folder / "owner.safetensors", timeout=PATIENCE_SECONDS)
    three.step_of([("thief", 21, 20)])
    three.finish("thief", 21)
    with pytest.raises(HiddenStatesError, match="byte for byte one of request owner"):
        load_hidden_states(three.folder / "thief.safetensors", timeout=PATIENCE_SECONDS)


def test_a_name_that_is_used_again_goes_behind_its_earlier_bearer(three):
    three.order("again")
    bearer = three.collector._of["again"]
    three.collector.all[bearer].step(Blocking(three))  # what comes behind it isn't sent until it is let go
    three.finish("again", 30)
    for i in range(2):  # whoever has least to do is another one
        three.order(f"other-{i}")
    assert three.collector._choose("new") != bearer
    assert three.collector._choose("again") == bearer
    Blocking.gate.set()
    three.wait_until(lambda: three.collector._choose("again") != bearer)
    for i in range(2):
        three.finish(f"other-{i}", 31)


def test_a_dead_writer_costs_its_own_requests_and_later_ones_go_to_those_that_live(tmp_path):
    handing = Handing(tmp_path, 2)
    pids = wait_for_pids(handing)
    names = [(f"r{i}", i) for i in range(4)]
    paths = [handing.order(name) for name, _ in names]
    handing.collector.wait_for_admissions(PATIENCE_SECONDS)
    handing.step_of(names, 0, 3)
    of = dict(handing.collector._of)
    assert sorted(of.values()) == [0, 0, 1, 1]
    os.kill(pids[1], signal.SIGKILL)
    handing.collector.all[1]._receiver.join(PATIENCE_SECONDS)
    handing.step_of(names, 3)
    late = handing.order("late")
    handing.collector.wait_for_admissions(PATIENCE_SECONDS)
    handing.step("late", 9)
    for name, seed in [*names, ("late", 9)]:
        handing.finish(name, seed)
    for path, (name, seed) in zip([*paths, late], [*names, ("late", 9)], strict=True):
        if of.get(name) == 1:
            with pytest.raises(HiddenStatesError, match="writer process of the engine died"):
                load_hidden_states(path, timeout=PATIENCE_SECONDS)
        else:
            assert np.array_equal(read_file(path, timeout=PATIENCE_SECONDS).rows, make_data(SPEC, seed=seed)[0])
    handing.wait_until(lambda: handing.num_released == 3)
    handing.wait_until(lambda: handing.collector.counts().get("files") == 3)
    assert handing.collector.counts()["failures.engine"] == 2
    # and when the last is gone, readers are told at once
    os.kill(pids[0], signal.SIGKILL)
    handing.collector.all[0]._receiver.join(PATIENCE_SECONDS)
    with pytest.raises(HiddenStatesError, match="writer process of the engine died"):
        load_hidden_states(handing.order("last"), timeout=PATIENCE_SECONDS)
    handing.collector.close()


VICTIM = textwrap.dedent("""
    import signal, sys
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from test_remote import Handing
    from test_writers import wait_for_pids

    handing = Handing(Path({folder!r}), 2)
    names = [(f"r{{i}}", i) for i in range(4)]
    for name, _ in names:
        handing.order(name)
    handing.collector.wait_for_admissions(60)
    handing.step_of(names)
    for name, seed in names[:2]:
        handing.finish(name, seed)
    handing.wait_until(lambda: handing.collector.counts().get("files") == 2)
    print(*wait_for_pids(handing), flush=True)
    signal.pause()
""")


def test_all_writers_of_a_killed_engine_tell_the_readers_of_what_was_not_finished_and_end(tmp_path):
    folder = tmp_path / "states"
    paths = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..", "..", "files")]
    engine = subprocess.Popen(
        [sys.executable, "-c", VICTIM.format(folder=str(folder), paths=paths)], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    pid_fds = [os.pidfd_open(pid) for pid in pids]
    try:
        engine.kill()
        engine.wait()
        for i in range(4):
            path = folder / f"r{i}.safetensors"
            if i < 2:
                assert np.array_equal(read_file(path, timeout=PATIENCE_SECONDS).rows, make_data(SPEC, seed=i)[0])
            else:
                with pytest.raises(HiddenStatesError, match="closed before the request was finished"):
                    load_hidden_states(path, timeout=PATIENCE_SECONDS)
        assert len(pids) == 2
        assert all(ended(pid_fd) for pid_fd in pid_fds)
    finally:
        engine.stdout.close()
        for pid_fd in pid_fds:
            os.close(pid_fd)


@pytest.mark.parametrize(("cores", "processes"), [(2, 1), (7, 1), (8, 2), (23, 2), (24, 3), (32, 4), (128, 4)])
def test_the_default_goes_by_the_cores_that_may_be_used(monkeypatch, cores, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_writers(StoreOptions()) == processes
    assert num_writers(StoreOptions(num_writer_processes=2)) == 2
    assert num_writers(StoreOptions(max_storage_bytes=1)) == num_writers(StoreOptions(prefix_rows_bytes=1)) == 1


@pytest.mark.parametrize("option", ["max_storage_bytes", "prefix_rows_bytes"])
def test_several_processes_are_refused_where_one_has_to_know_of_everything(option):
    with pytest.raises(OptionError, match=f"num_writer_processes: 2 can't be had with {option}"):
        num_writers(StoreOptions(num_writer_processes=2, **{option: 1 << 30}))


def test_together_they_use_what_one_would(tmp_path):
    handing = Handing(tmp_path, 3, max_bytes_in_flight=3000, num_writer_threads=8)
    try:
        shares = [writer.setup for writer in handing.collector.all]
    finally:
        handing.collector.close()
    assert [share.options.max_bytes_in_flight for share in shares] == [1000] * 3
    assert [share.options.num_writer_threads for share in shares] == [3] * 3
    assert sum(share.gather.limit_bytes for share in shares) <= 1 << 20
    assert sum(share.most_quarantined for share in shares) <= 16
    assert [share.sweeps for share in shares].count(True) == 1


class Block(torch.nn.Module):
    def forward(self, hidden):
        return hidden + 1


def test_rows_of_a_tap_come_through_two_writers_while_its_ring_goes_round_and_all_room_comes_back(tmp_path):
    """All but vLLM: the tap on plain modules, orders, prompts, single rows and endings through the worker's side."""
    hidden, prompt, generated, taps = 8, 9, 12, (1, 2, 3)
    tap = Tap(
        taps,
        hidden_size=hidden,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=40,
        max_plans=4,
        host_bytes=1,  # one step's
    )
    blocks = [Block() for _ in taps]
    tap.install(dict(enumerate(blocks)), "output", {})
    setup = writer_setup(tmp_path, taps, tap.host_ring.capacity, tap.cell_bytes, num_layers=3, num_gathered=8)
    worker = WorkerTap(tap, start_writers(setup, tap.cells, 2), taps, 0, is_alone=True)
    names = ["a", "b", "c", "d"]
    spec = CaptureSpec(
        layers=(3, 1),
        dtype="float32",
        hidden_size=hidden,
        prompt_len=prompt,
        max_tokens=generated,
        window=Window(include_output=True),
    )
    worker.apply(
        [
            Order(
                request_id=name,
                spec=spec,
                path=str(tmp_path / f"{name}.safetensors"),
                overwrite=False,
                public_id=name,
                tag=None,
            )
            for name in names
        ]
    )
    worker.unpacker.wait_for_admissions(PATIENCE_SECONDS)
    ids = {name: [100 * i + j for j in range(prompt + generated)] for i, name in enumerate(names)}
    entered = {name: [] for name in names}
    computed = 0
    for number, count in enumerate([prompt] + (generated - 1) * [1]):
        positions = torch.arange(computed, computed + count).repeat(len(names))
        tokens = torch.tensor([token for name in names for token in ids[name][computed : computed + count]])
        layout = Layout(names, np.arange(5) * count, np.full(4, computed), 4 * count, tokens, positions)
        tap.begin(layout, worker._wants)
        stream = torch.randn(4 * count, hidden)
        for i, name in enumerate(names):
            entered[name].append(stream[i * count : (i + 1) * count])
        for block in blocks:
            stream = block(stream)
        worker.unpacker.step(tap.end(number))
        computed += count
    worker.apply([Finish(request_id=name, token_ids=tuple(ids[name]), finish_reason="length") for name in names])
    for name in names:
        loaded = load_hidden_states(tmp_path / f"{name}.safetensors", timeout=PATIENCE_SECONDS)
        assert loaded["token_ids"].tolist() == ids[name][:-1]
        rows = torch.cat(entered[name])
        for slot, layer in enumerate(spec.layers):
            wanted = rows
            for _ in range(layer):
                wanted = wanted + 1
            assert torch.equal(loaded["hidden_states"][:, slot], wanted)
    Handing.wait_until(lambda: tap.host_ring.used == 0)
    worker.close()
    assert [writer.counts()["files"] for writer in worker.unpacker.all] == [2, 2]
