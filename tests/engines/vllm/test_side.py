"""The tap on a device that copies late: rows are right and buffers aren't reused too early; what the device says of the rows."""

import queue
import random
import threading

import late_side
import numpy as np
import pytest
import torch
from late_side import LateMark, LateSide
from torch import nn
from writer_cases import writer_setup

from layertap.capture import options
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.vllm import looks, worker
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.compat import Layout
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.tap import Tap
from layertap.engines.vllm.unpack import Unpacker, want_of
from layertap.engines.vllm.writer import make_recorder
from layertap.engines.vllm.writers import start_writers
from layertap.errors import CorruptError, HiddenStatesError
from layertap.files.format import row_digests
from layertap.files.read import load_hidden_states, read_file
from layertap.writing.sinks import FileSink

TAPS, HIDDEN, MAX_ROWS = (1, 2, 3), 64, 48
ROW_BYTES = len(TAPS) * HIDDEN * 4
PATIENCE_SECONDS = 60
KINDS = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


class Block(nn.Module):
    def forward(self, hidden):
        return hidden + 1


@pytest.fixture
def every_step(monkeypatch):
    """The device looks at small steps, too."""
    monkeypatch.setattr(looks, "_LEAST_BYTES", 1)


@pytest.fixture
def looking(monkeypatch, every_step):
    """With the kernel's arithmetic on the CPU."""
    monkeypatch.setattr(looks, "can_digest", lambda _rows: True)
    monkeypatch.setattr(looks, "start_digests", late_side.start_digests)


class Device:
    """A tap on such a device (or on a real one), with blocks that add one."""

    def __init__(self, num_steps=2, kind="cpu"):
        self.kind = kind
        self.tap = Tap(
            TAPS,
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=torch.device(kind),
            max_rows=MAX_ROWS,
            max_plans=4,
            host_bytes=num_steps * MAX_ROWS * ROW_BYTES,
            side=LateSide() if kind == "cpu" else None,
        )
        self.blocks = [Block() for _ in TAPS]
        self.tap.install(dict(enumerate(self.blocks)), "output", {})
        self.tap.reserve_arena()
        if kind == "cpu":
            self.tap._device_side.way.owns(self.tap._device_side.arena, self.tap._device_side.stamps)
        self.number = 0

    def run(self, wants, names, lengths, ids, computed=0, spoil=()):
        """One step; the stream that entered it. `spoil` are rows of it that become infinite."""
        num_rows = sum(lengths)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = torch.cat([torch.arange(computed, computed + length) for length in lengths])
        ids, positions = ids.to(self.kind), positions.to(self.kind)
        self.tap.begin(Layout(names, starts, np.full(len(lengths), computed), num_rows, ids, positions), wants)
        entering = torch.randn(num_rows, HIDDEN)
        entering[list(spoil)] = torch.inf
        stream = entering.to(self.kind)
        for block in self.blocks:
            stream = block(stream)
        self.number += 1
        return self.tap.end(self.number), entering


def spec_of(layers=TAPS, prompt=8, dtype="float32"):
    return CaptureSpec(layers=layers, dtype=dtype, hidden_size=HIDDEN, prompt_len=prompt, max_tokens=0, window=Window())


def order(name, path="", spec=None):
    spec = spec or spec_of()
    return Order(request_id=name, spec=spec, path=str(path), overwrite=False, public_id=name, tag=None, prefill=True)


def wants_of(names, spec=None):
    return {name: want_of(order(name, spec=spec), TAPS) for name in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_rows_are_right_however_late_copies_come_and_room_is_given_back(num_steps, kind):
    device, steps, failures = Device(num_steps, kind), queue.Queue(), []
    draw = random.Random(num_steps)

    def look(step, entering, ids):
        step.wait()
        found = step.cells.view(np.float32).reshape(-1, len(TAPS), HIDDEN)
        assert not step.unwritten().any()
        for slot, layer in enumerate(TAPS):
            wanted = entering
            for _ in range(layer):
                wanted = wanted + 1
            assert np.array_equal(found[:, slot], wanted.numpy())
        assert np.array_equal(step.positions_and_ids()[1], ids.numpy())

    def consume():
        unread, held, more = [], [], True
        while more or unread:
            try:
                item = steps.get(timeout=0.02)  # no more may come before those that came are given back
                more = item is not None
                unread += [item] if more else []
            except queue.Empty:
                item = None
            if item is not None and draw.random() < 0.6:
                continue
            for step, *facts in unread:
                try:
                    look(step, *facts)
                except BaseException as exc:  # noqa: BLE001 - raised by the test
                    failures.append(exc)
                held.append(step)
            unread = []
            draw.shuffle(held)
            while held:
                held.pop().release()

    thread = threading.Thread(target=consume)
    thread.start()
    for _ in range(120):
        lengths = [draw.randint(1, MAX_ROWS // 3) for _ in range(draw.randint(1, 3))]
        names = [f"r{i}" for i in range(len(lengths))]
        ids = torch.randint(0, 1000, (sum(lengths),))
        spec = spec_of(prompt=MAX_ROWS)
        steps.put((*device.run(wants_of(names, spec), names, lengths, ids), ids))
    steps.put(None)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert not failures
    assert device.tap.host_ring.used == 0
    device.tap.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captured", [["a", "b", "c"], ["a", "c"], ["b"]])
def test_the_digests_of_the_device_are_those_of_the_host(every_step, request, captured, kind):
    if kind == "cpu":
        request.getfixturevalue("looking")
    device = Device(kind=kind)
    ids = torch.randint(0, 150_000, (24,))
    step, _ = device.run(wants_of(captured), ["a", "b", "c"], [8, 8, 8], ids, spoil=[17])
    step.wait()
    assert [chunk.request_id for chunk in step.chunks] == captured
    for chunk in step.chunks:
        tokens = ids[chunk.first : chunk.stop].numpy()
        digests, all_finite = step.looks.of(chunk, tokens, ROW_BYTES)
        first = chunk.cell
        raw = np.ascontiguousarray(step.cells[first : first + len(tokens) * len(TAPS)]).reshape(len(tokens), -1)
        assert digests.tolist() == row_digests(raw, tokens).tolist()
        assert all_finite == (chunk.request_id != "c")
    step.release()
    device.tap.close()


def test_the_device_looks_only_where_every_row_is_of_all_taps_and_there_are_many(looking, monkeypatch):
    device = Device()
    ids = torch.arange(16)
    step, _ = device.run(wants_of(["a"]) | wants_of(["b"], spec_of((2, 3))), ["a", "b"], [8, 8], ids)
    assert step.looks is None
    step.release()
    monkeypatch.setattr(looks, "_LEAST_BYTES", 16 * ROW_BYTES + 1)
    step, _ = device.run(wants_of(["a", "b"]), ["a", "b"], [8, 8], ids)
    assert step.looks is None
    step.release()
    device.tap.close()


class Writing:
    """Orders, steps and endings for a collector that writes files."""

    def __init__(self, folder, device, way):
        tap = device.tap
        setup = writer_setup(folder, TAPS, tap.host_ring.capacity, tap.cell_bytes, num_layers=3, num_gathered=8)
        self.folder, self.device = folder, device
        if way == "process":
            self.collector = start_writers(setup, tap.cells, 1)
        else:
            self.collector = Collector(make_recorder(setup), TAPS, torch.float32, gather=setup.gather)

    def file(self, name, spec=None, damage=None):
        """Capture a prompt of 8 tokens; `damage` may change its step."""
        path = self.folder / f"{name}.safetensors"
        self.collector.order(order(name, path, spec))
        self.collector.wait_for_admissions(PATIENCE_SECONDS)
        ids = torch.arange(100, 108)
        step, entering = self.device.run(wants_of([name], spec), [name], [8], ids)
        assert step.looks is not None
        if damage is not None:
            step.wait()
            damage(step)
        self.collector.step(step)
        self.collector.finish(Finish(request_id=name, token_ids=tuple(ids.tolist()), finish_reason="prefill"))
        return path, entering


@pytest.fixture
def writing(looking, tmp_path, request):
    device = Device()
    made = Writing(tmp_path, device, getattr(request, "param", "threads"))
    yield made
    made.collector.close()
    device.tap.close()


@pytest.mark.parametrize("writing", ["threads", "process"], indirect=True)
def test_a_file_carries_the_digests_of_the_device(writing):
    path, entering = writing.file("good")
    loaded = load_hidden_states(path, timeout=PATIENCE_SECONDS)
    assert torch.equal(loaded["hidden_states"][:, 0], entering + 1)

    def spoil(step):
        step.looks.accumulators[3, 0] ^= 1

    path, _ = writing.file("other", damage=spoil)
    with pytest.raises(CorruptError, match="first row 3"):  # so nobody has computed them again
        read_file(path, timeout=PATIENCE_SECONDS)


def test_a_row_that_changed_on_its_way_to_the_host_is_found_by_the_reader_or_before(writing):
    def spoil(row):
        return lambda step: step.cells.__setitem__((row * len(TAPS), 5), step.cells[row * len(TAPS), 5] ^ 4)

    path, _ = writing.file("middle", damage=spoil(3))
    with pytest.raises(CorruptError, match="first row 3"):
        read_file(path, timeout=PATIENCE_SECONDS)
    path, _ = writing.file("last", damage=spoil(7))
    with pytest.raises(HiddenStatesError, match="the copy from the device is damaged"):
        load_hidden_states(path, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("spec", [spec_of((3, 1, 2)), spec_of(dtype="bfloat16")], ids=["order", "dtype"])
def test_rows_that_a_file_has_otherwise_than_the_device_get_digests_of_their_own(writing, spec):
    path, entering = writing.file("r", spec)
    loaded = load_hidden_states(path, timeout=PATIENCE_SECONDS)["hidden_states"]
    assert torch.equal(loaded[:, spec.layers.index(1)], (entering + 1).to(loaded.dtype))


def test_values_that_are_not_finite_are_refused_as_ever(writing):
    def spoil(step):
        step.looks.accumulators[2, 8] = 1
        step.cells.view(np.float32)[2 * len(TAPS), 9] = np.inf

    path, _ = writing.file("r", damage=spoil)
    with pytest.raises(HiddenStatesError, match="NaN|infinit|finite"):
        load_hidden_states(path, timeout=PATIENCE_SECONDS)


def test_a_device_whose_digests_are_wrong_is_not_asked(looking, monkeypatch, caplog):
    def wrong(rows, token_ids):
        found = late_side.start_digests(rows, token_ids)
        found[5, 2] ^= 1
        return found

    monkeypatch.setattr(looks, "start_digests", wrong)
    device = Device()
    assert "wrong" in caplog.text
    step, _ = device.run(wants_of(["a"]), ["a"], [8], torch.arange(8))
    assert step.looks is None
    step.release()
    device.tap.close()


def test_a_device_that_cannot_digest_is_not_asked():
    assert not looks.works(torch.device("cpu"), 3, 64, torch.float32)


def test_tokens_of_rows_are_in_the_order_of_cells(looking):
    def chunk(first, stop, cell):
        return Chunk("r", first, stop, cell, 2, 0)

    assert looks.tokens_of([chunk(3, 5, 0), chunk(5, 9, 4)], 2, 8) == slice(3, 9)
    assert looks.tokens_of([chunk(3, 5, 0), chunk(6, 8, 4)], 2, 8).tolist() == [3, 4, 6, 7]


@pytest.mark.parametrize("num_steps", [2, 4])
def test_a_ring_of_few_steps_is_warned_of_with_what_would_do(caplog, num_steps):
    device = Device(num_steps)
    worker._warn_of_small_ring(device.tap)
    needed = f"max_bytes_in_flight={4 * MAX_ROWS * ROW_BYTES} would hold 4"
    assert (needed in caplog.text) == (num_steps == 2)
    device.tap.close()


def test_the_ring_holds_four_steps_at_most():
    device = Device(100)
    assert device.tap.host_ring.capacity == 4 * MAX_ROWS * len(TAPS)
    device.tap.close()


def use(device, count, **options):
    """Some steps, each given back at once."""
    for _ in range(count):
        step, entering = device.run(wants_of(["a"]), ["a"], [8], torch.arange(8), **options)
        step.wait()
        assert np.array_equal(step.cells.view(np.float32)[:: len(TAPS)], (entering + 1).numpy())
        yield step
        step.release()


def test_where_a_look_fails_the_writer_looks_and_nothing_is_lost(looking, monkeypatch, caplog):
    device = Device(1)
    assert all(step.looks is not None for step in use(device, 3))

    def fail(_rows, _token_ids):
        raise torch.OutOfMemoryError("for the digests")

    monkeypatch.setattr(looks, "start_digests", fail)
    assert all(step.looks is None for step in use(device, 3))
    monkeypatch.setattr(looks, "start_digests", late_side.start_digests)
    assert all(step.looks is None for step in use(device, 30))  # and not tried again
    assert caplog.text.count("can't compute digests any more") == 1
    device.tap.close()


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_step_whose_copy_fails_leaves_room_for_the_others(monkeypatch, num_steps):
    device = Device(num_steps)
    real = LateSide.pinned

    def fail(*_args):
        raise RuntimeError("no pinned memory")

    for _ in range(12):  # more often than there is room for
        monkeypatch.setattr(LateSide, "pinned", fail)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            device.run(wants_of(["a"]), ["a"], [MAX_ROWS], torch.arange(MAX_ROWS))
        monkeypatch.setattr(LateSide, "pinned", real)
        assert len(list(use(device, 2))) == 2
    assert device.tap.host_ring.used == 0
    device.tap.close()


def test_what_was_launched_of_a_step_that_failed_is_done_before_its_room_is_given_to_others(monkeypatch):
    device = Device(1)
    real = LateMark.record
    failures = ["the last of the launches"]

    def record(mark):
        if mark._side.is_current and failures:
            raise RuntimeError(failures.pop())
        real(mark)

    monkeypatch.setattr(LateMark, "record", record)
    with pytest.raises(RuntimeError, match="the last"):
        device.run(wants_of(["a"]), ["a"], [8], torch.arange(8))
    assert not device.tap._device_side.way.launched
    assert len(list(use(device, 10))) == 10
    device.tap.close()


def test_room_is_given_back_only_when_rows_are_written(writing, monkeypatch):
    going_on = threading.Event()
    real = FileSink.write

    def write(*args):
        assert going_on.wait(PATIENCE_SECONDS)
        real(*args)

    monkeypatch.setattr(FileSink, "write", write)
    path, entering = writing.file("r")
    handed_over = threading.Event()
    writing.collector._queue(handed_over.set)
    assert handed_over.wait(PATIENCE_SECONDS)
    assert writing.device.tap.host_ring.used == 8 * len(TAPS)
    going_on.set()
    loaded = load_hidden_states(path, timeout=PATIENCE_SECONDS)
    assert torch.equal(loaded["hidden_states"][:, 0], entering + 1)


def test_a_stage_that_has_some_of_the_layers_hands_on_no_digests_of_them(looking):
    emitted = []

    class Stage(Unpacker):
        def emit(self, running, rows):
            emitted.append(rows)
            rows.release()

        def end(self, running, finish):
            pass

    device, stage = Device(), Stage(TAPS, torch.float32)
    spec = spec_of((1, 2, 3, 7))
    stage.order(order("r", spec=spec))
    step, _ = device.run(wants_of(["r"], spec), ["r"], [8], torch.arange(8))
    assert step.looks is not None
    stage.step(step)
    stage.order(order("whole"))
    step, _ = device.run(wants_of(["whole"]), ["whole"], [8], torch.arange(8))
    stage.step(step)
    stage.finish(Finish(request_id="r", token_ids=(), finish_reason="prefill"))
    stage.finish(Finish(request_id="whole", token_ids=(), finish_reason="prefill"))
    stage.close()
    assert [rows.digests is None for rows in emitted] == [True, False]
    device.tap.close()


def test_single_rows_are_no_reason_to_look(looking, monkeypatch):
    monkeypatch.setattr(looks, "_LEAST_BYTES", 2 * ROW_BYTES)
    device, names = Device(), ["a", "b", "c"]
    for lengths, looked in (([1, 1, 1], False), ([1, 2, 1], True)):
        step, _ = device.run(wants_of(names), names, lengths, torch.arange(sum(lengths)))
        assert (step.looks is not None) == looked
        step.release()
    device.tap.close()


@pytest.mark.parametrize(("given", "rings", "expected"), [(None, 1, 800), (None, 4, 200), (500, 4, 500)])
def test_rings_on_one_machine_share_what_one_would_have(monkeypatch, given, rings, expected):
    monkeypatch.setattr(options, "memory_bytes", lambda: 6400)
    found = worker.share_of_memory(StoreOptions(shared_storage_path="/x", max_bytes_in_flight=given), rings)
    assert found.byte_budget() == expected
