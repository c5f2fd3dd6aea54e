"""The faults that hidden-state extraction has really had elsewhere, put into the running product one at a time: each is caught.

A fault is put in where it would arise: in the forward's rows (`Passes.run`, `RowTap`), in what an engine hands over
(`Capture.add`), or in the files. docs/trust.md lists them with the check that catches each, and how long that took in the run whose
lines `pytest -s` printed; `caught` compares each line with the table.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from file_cases import make_data, make_recorder, make_spec, write_sample
from torch import nn

from layertap import (
    LLM,
    CorruptError,
    ExtractionError,
    HiddenStatesError,
    MissingError,
    SamplingParams,
    TornError,
    load_hidden_states,
)
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
SPOT_CHECK, ROW_CHECKS, READER = "spot check", "always-on check of rows", "reader (length, checksums)"
CAUGHT_BY = {
    "rows shifted by a wrong block size": SPOT_CHECK,
    "padding written over the last row": SPOT_CHECK,
    "layer off by one": SPOT_CHECK,
    "rows of two requests swapped": SPOT_CHECK,
    "last layer dropped, the one before saved twice": SPOT_CHECK,
    "layer off by one everywhere": "doctor (layer ids)",
    "zeros": ROW_CHECKS,
    "one value is NaN": ROW_CHECKS,
    "last layer never handed over": "assembly (hole)",
    "last row never handed over": "assembly (hole)",
    "stale residual: the buffer of the request before": f"{ROW_CHECKS} (another request's)",
    "tokens and rows of another request": "assembly (input ids)",
    "a row left over from the batch before: the tap didn't write it": "mark in the arena, seen by the check of rows",
    "a layer left over from the batch before: the tap didn't write it": "mark in the arena, seen by the check of rows",
    "cells left over from the step before: a graph without the tap": "generation stamps",
    "cells left over from the step before: maps of another step": "generation stamps",
    "generated rows shifted against their tokens": SPOT_CHECK,
    "generated rows shifted against their tokens, everywhere": "doctor (generated and prefilled)",
    "half-written file": READER,
    "file with a part of zeros": READER,
    "lock deleted by a reader, before the file is there": "reader (no file and nobody who writes it)",
}


def documented():
    """The table: fault, where it is put in, caught by, after."""
    text = DOCS.read_text().partition("| fault | where it is put in | caught by | after |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


@contextmanager
def caught(fault: str) -> Iterator[None]:
    """Around what must notice a fault that was just put in; prints how long that took."""
    began = time.monotonic()
    yield
    print(f"\n| {fault} | {CAUGHT_BY[fault]} | {1000 * (time.monotonic() - began):.3g} ms |")
    assert documented()[fault][1] == CAUGHT_BY[fault]


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
    ("name", "fault"),
    [
        ("rows shifted by a wrong block size", rows_shifted_by_a_wrong_block_size),
        ("padding written over the last row", padding_written_over_the_last_row),
        ("layer off by one", layer_off_by_one),
        ("rows of two requests swapped", rows_of_two_requests_swapped),
        ("last layer dropped, the one before saved twice", last_layer_dropped_and_the_one_before_saved_twice),
    ],
)
def test_a_fault_in_shared_forwards_is_caught_by_the_spot_check(name, fault, checkpoint, monkeypatch):
    real = Passes.run

    def run(self, way, sequences, wanted, layers, rows):
        real(self, way, sequences, wanted, layers, rows)
        if way != "alone":
            fault(rows)

    with LLM(checkpoint, layers=[1, 2, 4], spot_check=1) as llm:
        assert len(list(llm.extract(PROMPTS))) == 2  # right without the fault
        monkeypatch.setattr(Passes, "run", run)
        with (
            caught(name),
            pytest.raises(ExtractionError, match=r"got other rows|the same as the one before|byte for byte"),
        ):
            list(llm.extract(PROMPTS))


def test_a_layer_that_is_off_by_one_in_every_forward_is_caught_by_the_doctor(checkpoint, tmp_path, monkeypatch):
    real = Passes.run

    def run(self, way, sequences, wanted, layers, rows):
        real(self, way, sequences, wanted, layers, rows)
        layer_off_by_one(rows)

    with LLM(checkpoint, layers="all", storage=tmp_path) as llm:
        llm._front.engine.routes()  # what the self-tests would see is another matter
        monkeypatch.setattr(Passes, "run", run)
        with caught("layer off by one everywhere"):
            assert "layer ids" in doctors_findings(llm, tmp_path)


def doctors_findings(llm, folder):
    """What is bad."""
    report = Report(model="m", engine="transformers")
    examine_model(report, llm, folder, trust_remote_code=False)
    return {finding.name for finding in report.bad}


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
    ("name", "fault", "reason"),
    [
        ("zeros", zeros, "all zero"),
        ("one value is NaN", one_value_is_nan, "NaN or infinity, first at position 5, layer 2"),
        ("last layer never handed over", last_layer_never_handed_over, "the first hole is position 0, layer 4"),
        ("last row never handed over", last_row_never_handed_over, "the first hole is position 7, layer 1"),
        ("stale residual: the buffer of the request before", StaleResidual(), "byte for byte one of request"),
        ("tokens and rows of another request", OtherRequest(), "rows are of other tokens than the sequence's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_in_what_is_handed_over_is_caught_by_a_check_that_is_always_on(
    name, fault, reason, checkpoint, monkeypatch
):
    real = Capture.add
    with LLM(checkpoint, layers=[1, 2, 4], spot_check=0) as llm:
        list(llm.extract([[60, 61, 62]]))  # the self-tests of a first use are not what is timed
        monkeypatch.setattr(Capture, "add", lambda self, rows: real(self, fault(rows)))
        with caught(name), pytest.raises(ExtractionError, match=reason):
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
        with (
            caught(f"a {missing} left over from the batch before: the tap didn't write it"),
            pytest.raises(ExtractionError, match=f"the tap didn't write the row at {where}"),
        ):
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


@pytest.mark.parametrize("fault", ["a graph without the tap", "maps of another step"])
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
    with (
        caught(f"cells left over from the step before: {fault}"),
        pytest.raises(HiddenStatesError, match="of 18 rows weren't written by the tap in this step"),
    ):
        engine.run("stale")
    engine.close()


def shift_generated_rows(monkeypatch):
    real = _Group._rows
    monkeypatch.setattr(_Group, "_rows", lambda self, hidden: real(self, hidden.roll(1, dims=0)))


def test_rows_of_generation_shifted_against_their_tokens_are_caught_by_the_spot_check(
    checkpoint, tmp_path, monkeypatch
):
    wanted = {"kv_transfer_params": {"include_output_tokens": True}}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, extra_args=wanted)
    with LLM(checkpoint, layers=[1, 2, 4], storage=tmp_path, spot_check=1) as llm:
        (right,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        load_hidden_states(right.kv_transfer_params["hidden_states_path"])
        shift_generated_rows(monkeypatch)
        with caught("generated rows shifted against their tokens"):
            (output,) = llm.generate(PROMPTS[1:], params, use_tqdm=False)
            with pytest.raises(HiddenStatesError, match="computed the sequence again and got other rows"):
                load_hidden_states(output.kv_transfer_params["hidden_states_path"])


def test_rows_of_generation_shifted_in_every_step_are_caught_by_the_doctor(checkpoint, tmp_path, monkeypatch):
    with LLM(checkpoint, layers="all", storage=tmp_path, spot_check=0) as llm:
        llm._front.engine.verdict()  # made before the fault: its own trial would refuse to generate
        shift_generated_rows(monkeypatch)
        with caught("generated rows shifted against their tokens, everywhere"):
            assert "generated and prefilled" in doctors_findings(llm, tmp_path)


def test_half_written_files_are_never_delivered(tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with caught("half-written file"), pytest.raises(TornError):
            load_hidden_states(path)
    path.write_bytes(whole[:-100] + bytes(100))
    with caught("file with a part of zeros"), pytest.raises(CorruptError, match="checksums"):
        load_hidden_states(path)


def test_a_lock_deleted_by_a_reader_makes_no_other_reader_take_a_half_file(tmp_path):
    spec = make_spec()
    rows, ids = make_data(spec)
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    capture = recorder.admit(spec, request_id="r", path=path)
    os.unlink(tmp_path / "a.safetensors.lock")
    with caught("lock deleted by a reader, before the file is there"), pytest.raises(MissingError):
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


def test_the_table_in_the_docs_lists_every_fault_and_no_other():
    assert {fault: cells[1] for fault, cells in documented().items()} == CAUGHT_BY
    assert all(cells[2].endswith(" ms") for cells in documented().values())
