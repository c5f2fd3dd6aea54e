"""The faults that hidden-state extraction has really had elsewhere, put into the running product one at a time: each is caught.

A fault is put in where it would arise: in the forward's rows (`Passes.run`, `RowTap`), in what an engine hands over
(`Capture.add`), or in the files. docs/trust.md lists them with the check that catches each; a test keeps that table true.
"""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from file_cases import make_data, make_recorder, make_spec, write_sample
from torch import nn

from layertap import LLM, ExtractionError, HiddenStatesError, MissingError, TornError, load_hidden_states
from layertap.assembly import Rows
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.row_tap import _Group
from layertap.engines.transformers.tap import _Target
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.compat import Layout
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.tap import Tap as VllmTap
from layertap.engines.vllm.unpack import want_of
from layertap.files.read import read_file
from layertap.testing import zoo
from layertap.trust.findings import Report
from layertap.trust.model import examine_model
from layertap.writing.recorder import Capture

PROMPTS = [[9, 10, 11, 12, 13, 14, 15, 16], [30, 31, 32, 33, 34, 35, 36, 37]]
DOCS = Path(__file__).parents[2] / "docs" / "trust.md"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


def rows_shifted_by_a_wrong_block_size(rows):
    rows.copy_(rows.roll(2, dims=0))


def padding_written_over_the_last_row(rows):
    rows[7] = rows[0]
    rows[15] = rows[0]


def layer_off_by_one(rows):
    rows[:, 1:] = rows[:, :-1].clone()


def rows_of_two_requests_swapped(rows):
    rows.copy_(rows.roll(8, dims=0))


def last_layer_dropped_and_the_one_before_saved_twice(rows):
    rows[:, -1] = rows[:, -2]


@pytest.mark.parametrize(
    "fault",
    [
        rows_shifted_by_a_wrong_block_size,
        padding_written_over_the_last_row,
        layer_off_by_one,
        rows_of_two_requests_swapped,
        last_layer_dropped_and_the_one_before_saved_twice,
    ],
)
def test_a_fault_in_shared_forwards_is_caught_by_the_spot_check(fault, checkpoint, monkeypatch):
    real = Passes.run

    def run(self, way, sequences, wanted, layers, rows):
        real(self, way, sequences, wanted, layers, rows)
        if way != "alone":
            fault(rows)

    with LLM(checkpoint, layers=[1, 2, 4], spot_check=1) as llm:
        assert len(list(llm.extract(PROMPTS))) == 2  # right without the fault
        monkeypatch.setattr(Passes, "run", run)
        with pytest.raises(ExtractionError, match=r"got other rows|the same as the one before|byte for byte"):
            list(llm.extract(PROMPTS))


def zeros(rows):
    return replace(rows, data=np.zeros_like(rows.data), digests=None)


def one_value_is_nan(rows):
    data = rows.data.copy()
    data[5, 1, 4:8] = 0xFF
    return replace(rows, data=data, digests=None)


def last_layer_never_handed_over(rows):
    return replace(rows, slots=slice(0, 2), data=rows.data[:, :2], digests=None)


def last_row_never_handed_over(rows):
    return replace(rows, input_ids=rows.input_ids[:-1], data=rows.data[:-1], digests=None)


class StaleResidual:
    """The buffer still holds the rows of the request before."""

    def __init__(self):
        self.before = None

    def __call__(self, rows):
        stale, self.before = self.before, rows.data.copy()
        return rows if stale is None else replace(rows, data=stale, digests=None)


class OtherRequest:
    """Tokens and rows of the request before, together."""

    def __init__(self):
        self.before = None

    def __call__(self, rows):
        other, self.before = self.before, (rows.data.copy(), rows.input_ids.copy())
        return rows if other is None else replace(rows, data=other[0], input_ids=other[1], digests=None)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (zeros, "all zero"),
        (one_value_is_nan, "NaN or infinity, first at position 5, layer 2"),
        (last_layer_never_handed_over, "never arrived; the first hole is position 0, layer 4"),
        (last_row_never_handed_over, "never arrived; the first hole is position 7, layer 1"),
        (StaleResidual(), "byte for byte one of request"),
        (OtherRequest(), "rows are of other tokens than the sequence's"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else "",
)
def test_a_fault_in_what_is_handed_over_is_caught_by_a_check_that_is_always_on(fault, reason, checkpoint, monkeypatch):
    real = Capture.add
    with LLM(checkpoint, layers=[1, 2, 4]) as llm:
        monkeypatch.setattr(Capture, "add", lambda self, rows: real(self, fault(rows)))
        with pytest.raises(ExtractionError, match=reason):
            list(llm.extract(PROMPTS))


@pytest.mark.parametrize("missing", ["row", "layer"])
def test_a_row_left_over_from_the_batch_before_is_caught_where_the_tap_did_not_write_it(
    missing, checkpoint, monkeypatch
):
    real = _Target.copy

    def copy(self, stream, slot):
        kept = self.rows[7, slot].clone() if missing == "row" else self.rows[:, slot].clone()
        real(self, stream, slot)
        if missing == "row":
            self.rows[7, slot] = kept
        elif slot == 1:
            self.rows[:, slot] = kept

    with LLM(checkpoint, layers=[1, 2, 4], spot_check=0) as llm:
        assert len(list(llm.extract(PROMPTS))) == 2  # the arena holds their rows now
        monkeypatch.setattr(_Target, "copy", copy)
        where = "position 7, layer 1" if missing == "row" else "position 0, layer 2"
        with pytest.raises(ExtractionError, match=f"the tap didn't write the row at {where}"):
            list(llm.extract([[50 + token for token in prompt] for prompt in PROMPTS]))


class OtherEngine:
    """What a worker of the vLLM engine does around a step, with blocks that count upwards."""

    def __init__(self, folder):
        self.folder = folder
        self.spec = CaptureSpec(
            layers=(1, 2, 3), dtype="float32", hidden_size=16, prompt_len=6, max_tokens=0, window=Window()
        )
        self.blocks = [Block() for _ in range(3)]
        taps = (1, 2, 3)
        self.tap = VllmTap(
            taps,
            hidden_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_rows=8,
            max_plans=2,
            host_bytes=1 << 20,
        )
        self.tap.install(dict(enumerate(self.blocks)), "first", {})
        self.collector = Collector(make_recorder(), taps, torch.float32)
        self.number = 0

    def run(self, name):
        """A prompt of six tokens in one step; what its reader gets."""
        path, ids = self.folder / f"{name}.safetensors", torch.arange(6) + 7 * self.number
        order = Order(request_id=name, spec=self.spec, path=str(path), overwrite=False, public_id=name, tag=None)
        self.collector.order(order)
        self.collector.wait_for_admissions(30)
        layout = Layout([name], np.array([0, 6]), np.zeros(1, np.int64), 6, ids, torch.arange(6))
        self.tap.begin(layout, {name: want_of(order, (1, 2, 3))})
        hidden = torch.randn(6, 16)
        for block in self.blocks:
            hidden = block(hidden)
        self.collector.step(self.tap.end(self.number))
        self.number += 1
        self.collector.finish(Finish(request_id=name, token_ids=tuple(ids.tolist()), finish_reason="prefill"))
        return read_file(path, timeout=30)

    def close(self):
        self.tap.close()
        self.collector.close()


class Block(nn.Module):
    def forward(self, hidden):
        return hidden + torch.arange(1, 17)


@pytest.mark.parametrize("fault", ["a graph without the tap", "maps of the step before"])
def test_cells_left_over_from_the_step_before_are_caught_by_their_stamps_on_the_vllm_engine(
    fault, tmp_path, monkeypatch
):
    engine = OtherEngine(tmp_path)
    assert engine.run("before").info.num_rows == 6
    assert engine.run("right").info.num_rows == 6
    if fault == "a graph without the tap":
        del engine.blocks[1].forward
    else:
        engine.tap._destinations[:3] = torch.arange(0, 9, 3, dtype=torch.int32)
        monkeypatch.setattr(engine.tap, "_fill_maps", lambda *args: None)
    with pytest.raises(HiddenStatesError, match="of 18 rows weren't written by the tap in this step"):
        engine.run("stale")
    engine.close()


def test_rows_of_generation_shifted_against_their_tokens_are_caught_by_the_doctor(checkpoint, tmp_path, monkeypatch):
    real = _Group._rows
    monkeypatch.setattr(_Group, "_rows", lambda self, hidden: real(self, hidden.roll(1, dims=0)))
    report = Report(model="m", engine="transformers")
    with LLM(checkpoint, layers="all", storage=tmp_path) as llm:
        examine_model(report, llm, tmp_path, trust_remote_code=False)
    assert {finding.name for finding in report.bad} & {"generated and prefilled", "generated"}


def test_half_written_files_are_never_delivered(tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TornError):
            load_hidden_states(path)
    path.write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(HiddenStatesError):
        load_hidden_states(path)


def test_a_lock_deleted_by_a_reader_makes_no_other_reader_take_a_half_file(tmp_path):
    spec = make_spec()
    rows, ids = make_data(spec)
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    capture = recorder.admit(spec, request_id="r", path=path)
    os.unlink(tmp_path / "a.safetensors.lock")
    with pytest.raises(MissingError):
        read_file(path, timeout=5)
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    capture.finish(ids, "prefill").result(30)
    assert read_file(path).rows.tobytes() == rows.tobytes()


def test_two_waiting_readers_both_get_the_file(tmp_path):
    """speculators' readers deleted the lock: of three that waited one got the file."""
    spec = make_spec()
    rows, ids = make_data(spec)
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    capture = recorder.admit(spec, request_id="r", path=path)
    got = []
    readers = [
        threading.Thread(target=lambda: got.append(read_file(path, timeout=60).rows.tobytes())) for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    capture.finish(ids, "prefill")
    for reader in readers:
        reader.join()
    assert got == [rows.tobytes()] * 3


def test_the_table_in_the_docs_lists_every_fault():
    text = DOCS.read_text()
    for words in (
        "wrong block size",
        "over the last row",
        "off by one",
        "swapped",
        "saved twice",
        "zeros",
        "NaN",
        "never handed over",
        "stale",
        "another request",
        "left over",
        "generated rows",
        "half-written",
        "lock deleted",
    ):
        assert words in text, words
