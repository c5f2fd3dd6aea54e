"""The writer process beside an engine that is killed: it ends, publishes what it was given whole, and tells the other readers."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from file_cases import make_data
from writer_cases import writer_setup

from layertap import load_hidden_states
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.vllm.lifeline import Lifeline
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.shared import SharedCells
from layertap.engines.vllm.tap import Step
from layertap.engines.vllm.writers import start_writers
from layertap.errors import HiddenStatesError
from layertap.files.read import read_file

HIDDEN, LAYERS, ROWS = 8, (3, 1), 6
SPEC = CaptureSpec(layers=LAYERS, dtype="float32", hidden_size=HIDDEN, prompt_len=ROWS, max_tokens=0, window=Window())
PATIENCE_SECONDS = 60


class Handing:
    """An engine's side of a writer process, without an engine: hands over rows that the tests know."""

    def __init__(self, folder, num_processes=1, **options):
        self.folder = folder
        self.ring = SharedCells(256, HIDDEN * 4)
        self.collector = start_writers(
            writer_setup(folder, (1, 3), 256, HIDDEN * 4, num_layers=4, num_gathered=4, **options),
            self.ring,
            num_processes,
        )
        self.cell = self.number = self.num_released = 0

    def order(self, name):
        path = self.folder / f"{name}.safetensors"
        self.collector.order(
            Order(request_id=name, spec=SPEC, path=str(path), overwrite=False, public_id=name, tag=None, prefill=True)
        )
        return path

    def step(self, name, seed, first=0, stop=ROWS):
        self.step_of([(name, seed)], first, stop)

    def step_of(self, named_seeds, first=0, stop=ROWS):
        """One step with rows of several requests: (name, seed of its tokens, and of its rows where that is another)."""
        import torch

        num_rows, per_request = stop - first, (stop - first) * len(LAYERS)
        count = per_request * len(named_seeds)
        cells = self.ring.array[self.cell : self.cell + count]
        chunks, facts = [], []
        for i, (name, seed, *other) in enumerate(named_seeds):
            rows, ids = make_data(SPEC, seed=seed)
            if other:
                rows, _ = make_data(SPEC, seed=other[0])
            cells[i * per_request : (i + 1) * per_request] = rows[first:stop].reshape(per_request, -1)
            chunks.append(Chunk(name, i * num_rows, (i + 1) * num_rows, i * per_request, len(LAYERS), 0))
            facts.append(np.stack([np.arange(first, stop), ids[first:stop]]))
        facts = np.concatenate(facts, axis=1)
        self.collector.step(
            Step(
                self.number,
                chunks,
                cells,
                self._released,
                torch.from_numpy(facts),
                self.cell,
                self._stamped(count),
                self.number + 1,
            )
        )
        self.cell, self.number = self.cell + count, self.number + 1

    def _stamped(self, count):
        stamps = self.ring.stamps[self.cell : self.cell + count]
        stamps[:] = self.number + 1
        return stamps

    def finish(self, name, seed):
        ids = make_data(SPEC, seed=seed)[1]
        self.collector.finish(Finish(request_id=name, token_ids=tuple(ids.tolist()), finish_reason="prefill"))

    def flush(self):
        """Wait until everything but the last message was sent."""
        self.wait_until(self.collector._outbox.empty)

    @staticmethod
    def wait_until(condition):
        pause = threading.Event()
        for _ in range(PATIENCE_SECONDS * 100):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("waited in vain")

    def _released(self):
        self.num_released += 1


VICTIM = textwrap.dedent("""
    import os, signal, subprocess, sys
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from test_remote import Handing

    handing = Handing(Path({folder!r}))
    collector = handing.collector
    # what a forked helper of the engine would hold, and keep open when the engine is gone
    copy = os.dup(collector._connection.fileno())
    holder = subprocess.Popen(["sleep", "600"], pass_fds=[copy])
    handing.order("whole"), handing.order("half")
    collector.wait_for_admissions(60)
    os.kill(collector.pid, signal.SIGSTOP)  # what follows is still on its way when the engine dies
    handing.step("whole", 1)
    handing.finish("whole", 1)
    handing.step("half", 2, 0, 3)
    handing.step("half", 2, 3, 4)
    handing.flush()
    print(collector.pid, holder.pid, flush=True)
    signal.pause()
""")


def ended(pid_fd):
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    return bool(poll.poll(PATIENCE_SECONDS * 1000))


def test_the_writer_of_a_killed_engine_publishes_what_is_whole_and_ends_though_a_child_holds_the_connection(tmp_path):
    folder = tmp_path / "states"
    paths = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..", "..", "files")]
    engine = subprocess.Popen(
        [sys.executable, "-c", VICTIM.format(folder=str(folder), paths=paths)], stdout=subprocess.PIPE, text=True
    )
    writer, holder = (int(pid) for pid in engine.stdout.readline().split())
    writer_fd = os.pidfd_open(writer)
    try:
        engine.kill()
        engine.wait()
        os.kill(writer, signal.SIGCONT)
        loaded = read_file(folder / "whole.safetensors", timeout=PATIENCE_SECONDS)
        rows, ids = make_data(SPEC, seed=1)
        assert np.array_equal(loaded.rows, rows)
        assert loaded.token_ids.tolist() == ids.tolist()
        with pytest.raises(HiddenStatesError, match="closed before the request was finished"):
            load_hidden_states(folder / "half.safetensors", timeout=PATIENCE_SECONDS)
        assert ended(writer_fd)
        assert sorted(path.name for path in folder.iterdir()) == [
            "half.safetensors.error",
            "half.safetensors.lock",
            "whole.safetensors",
            "whole.safetensors.lock",
        ]
    finally:
        os.close(writer_fd)
        os.kill(holder, signal.SIGKILL)
        engine.stdout.close()


def test_a_forked_child_doesnt_hold_the_connection_and_a_dead_writer_is_counted(tmp_path):
    handing = Handing(tmp_path)
    collector = handing.collector
    handing.order("a")
    collector.wait_for_admissions(PATIENCE_SECONDS)
    connection = collector._connection.fileno()
    child = os.fork()
    if not child:
        try:
            os.fstat(connection)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    os.kill(collector.pid, signal.SIGKILL)
    collector._receiver.join(PATIENCE_SECONDS)
    handing.step("a", 1)
    late = handing.order("b")
    for path in (tmp_path / "a.safetensors", late):
        with pytest.raises(HiddenStatesError, match="writer process of the engine died"):
            load_hidden_states(path, timeout=PATIENCE_SECONDS)
    handing.wait_until(lambda: handing.num_released == 1)
    assert collector.counts()["failures.engine"] == 2
    collector.close()


def test_a_step_that_cant_be_read_costs_its_request_and_its_room_comes_back(tmp_path):
    handing = Handing(tmp_path)
    lost, good = handing.order("lost"), handing.order("good")
    handing.collector.wait_for_admissions(PATIENCE_SECONDS)

    class Broken(Step):
        def wait(self):
            raise RuntimeError("the copy failed")

    handing.collector.step(
        Broken(
            0,
            [Chunk("lost", 0, 1, 0, 2, 0)],
            handing.ring.array[:2],
            handing._released,
            None,
            0,
            handing.ring.stamps[:2],
            1,
        )
    )
    handing.step("good", 3)
    handing.finish("good", 3)
    with pytest.raises(HiddenStatesError, match="the copy failed"):
        load_hidden_states(lost, timeout=PATIENCE_SECONDS)
    assert np.array_equal(read_file(good, timeout=PATIENCE_SECONDS).rows, make_data(SPEC, seed=3)[0])
    handing.wait_until(lambda: handing.num_released == 2)
    handing.collector.close()
    counts = handing.collector.counts()
    assert (counts["files"], counts["failures.engine"]) == (1, 1)


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_a_lifeline_waits_for_its_parent_and_no_longer(with_pidfd):
    code = f"""
import os, sys
from layertap.engines.vllm.lifeline import Lifeline
if not {with_pidfd}:
    def refuse(pid): raise PermissionError("no pidfd here")
    os.pidfd_open = refuse
read_end, write_end = os.pipe()
parent = os.fork()
if parent:
    os.close(write_end)
    os.waitpid(parent, 0)
    print(os.read(read_end, 100).decode())
    os._exit(0)
asking, told = os.pipe()
if not os.fork():
    lifeline = Lifeline(os.getppid())
    os.write(told, b"x")
    lifeline.wait()
    os.write(write_end, b"gone")
    os._exit(0)
os.read(asking, 1)
os.close(write_end)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "gone"


def test_a_lifeline_whose_engine_isnt_the_parent_takes_it_for_gone():
    Lifeline(os.getpid()).wait()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_a_writer_takes_to_begin_is_no_part_of_what_a_store_may_take(tmp_path, num_processes):
    handing = Handing(tmp_path, num_processes)
    handing.order("a")
    handing.collector.wait_for_admissions(0.0)
    writers = getattr(handing.collector, "all", [handing.collector])
    assert all(writer.pid is not None for writer in writers)
    handing.step("a", 1)
    handing.finish("a", 1)
    handing.collector.close()
    assert load_hidden_states(tmp_path / "a.safetensors")["token_ids"].numel() == ROWS


def test_a_lock_that_a_store_was_too_slow_for_is_not_waited_for_again(tmp_path):
    handing = Handing(tmp_path)
    handing.collector.wait_until_started()
    os.kill(handing.collector.pid, signal.SIGSTOP)
    try:
        path = handing.order("slow")
        handing.collector.wait_for_admissions(0.01)
        handing.collector.wait_for_admissions(3600)
        assert not path.with_name(path.name + ".lock").exists()
    finally:
        os.kill(handing.collector.pid, signal.SIGCONT)
    handing.order("next")
    handing.collector.wait_for_admissions(PATIENCE_SECONDS)
    assert {lock.name for lock in tmp_path.glob("*.lock")} == {"slow.safetensors.lock", "next.safetensors.lock"}
    for seed, name in enumerate(("slow", "next")):
        handing.step(name, seed)
        handing.finish(name, seed)
    handing.collector.close()
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {"slow.safetensors", "next.safetensors"}
