"""The corridor as an engine uses it: bounded memory that can't deadlock, order, failures that stay their own, threads."""

import threading

import numpy as np
import pytest
from file_cases import make_data, make_recorder, make_spec, write_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.assembly import Rows
from layertap.capture.request import Window
from layertap.errors import EngineError, OptionError
from layertap.files.read import load_hidden_states


def rows_of(data, ids, start, stop, step=0, slots=None, release=None):
    slots = slots or slice(0, data.shape[1])
    return Rows(step, start, ids[start:stop], slots, data[start:stop, slots], release)


def test_far_more_unfinished_rows_than_the_budget_do_not_deadlock(tmp_path):
    """200 unfinished samples, 12.5 MiB of rows, through a budget of 64 KiB."""
    spec = make_spec(num_rows=64, hidden_size=128)
    recorder = make_recorder(max_bytes_in_flight=64 << 10, num_writer_threads=2)
    samples = [
        (*make_data(spec, seed=n), recorder.admit(spec, request_id=str(n), path=tmp_path / f"{n}.safetensors"))
        for n in range(200)
    ]
    for start in range(0, 64, 16):
        for data, ids, capture in samples:
            capture.add(rows_of(data, ids, start, start + 16))
    for _, ids, capture in samples:
        capture.finish(ids, "prefill")
    for data, _, capture in samples:
        assert capture.result.result(60).path.exists()
        assert load_hidden_states(capture.path)["hidden_states"].numpy().tobytes() == data.tobytes()
    assert 0 < recorder.budget.peak_bytes <= 64 << 10
    assert recorder.budget.in_flight_bytes == 0


def test_rows_in_bounded_memory_do_not_wait_for_the_byte_budget(tmp_path):
    """They would for ever here: the budget is taken by rows that aren't written until these are there."""
    spec = make_spec(num_rows=64, hidden_size=128)
    data, ids = make_data(spec)
    recorder = make_recorder(max_bytes_in_flight=1 << 10, num_writer_threads=2)
    recorder.budget.acquire(1 << 10, [])
    capture = recorder.admit(spec, request_id="r", path=tmp_path / "r.safetensors")
    rows = rows_of(data, ids, 0, 64)
    rows.is_bounded = True
    capture.add(rows)
    capture.finish(ids, "prefill").result(30)
    assert load_hidden_states(capture.path)["hidden_states"].numpy().tobytes() == data.tobytes()
    assert recorder.budget.in_flight_bytes == recorder.budget.peak_bytes == 1 << 10


def test_every_chunk_is_released_exactly_once_whatever_happens(tmp_path):
    spec = make_spec()
    data, ids = make_data(spec)
    recorder = make_recorder()
    released = []

    def chunk(name, start, stop):
        return rows_of(data, ids, start, stop, release=lambda: released.append(name))

    done = recorder.admit(spec, request_id="done", path=tmp_path / "done.safetensors")
    done.add(chunk("stored", 0, 6))
    done.finish(ids, "prefill").result(30)
    done.add(chunk("late", 0, 6))
    failed = recorder.admit(spec, request_id="failed", path=tmp_path / "failed.safetensors")
    failed.fail("reason")
    failed.add(chunk("failed", 0, 6))
    windowed = recorder.admit(
        make_spec(window=Window(positions=(4, 6))), request_id="w", path=tmp_path / "w.safetensors"
    )
    windowed.add(chunk("outside", 0, 3))
    bad = recorder.admit(spec, request_id="bad", path=tmp_path / "bad.safetensors")
    wrong = chunk("wrong", 0, 6)
    wrong.data = wrong.data[:, :, :4]
    bad.add(wrong)
    with pytest.raises(EngineError, match="have shape"):
        bad.finish(ids, "prefill").result(30)
    recorder.close()
    assert sorted(released) == ["failed", "late", "outside", "stored", "wrong"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_from_several_threads_and_stages_make_the_same_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("stages")
    spec = make_spec(num_rows=10, layers=(0, 1, 2))
    rows, ids = make_data(spec, seed=data.draw(st.integers(0, 5)))
    path = folder / "a.safetensors"
    recorder = make_recorder(num_writer_threads=3)
    capture = recorder.admit(spec, request_id="r", path=path)
    cut = data.draw(st.integers(0, 10))
    stale = rows.copy()
    stale[:] = 7

    def stage(slots):
        capture.add(Rows(1, 0, ids, slots, stale[:, slots]))  # computed once, then preempted
        for start, stop in ((0, cut), (cut, 10)):
            if start < stop:
                capture.add(rows_of(rows, ids, start, stop, step=2, slots=slots))

    threads = [threading.Thread(target=stage, args=(slots,)) for slots in (slice(0, 1), slice(1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = capture.finish(ids, "prefill").result(30)
    assert result.info.facts["replayed_rows"] != "0"
    assert load_hidden_states(path)["hidden_states"].numpy().tobytes() == rows.tobytes()
    recorder.close()


def test_in_memory_the_rows_come_back_without_a_file(tmp_path):
    spec = make_spec(window=Window(positions=(1, 4)))
    data, ids, result = write_sample(make_recorder(), None, spec)
    np.testing.assert_array_equal(result.rows, data[1:4])
    assert result.token_ids.tolist() == ids[1:4].tolist()
    assert result.path is None
    assert result.info.first_position == 1


def test_a_failing_sample_leaves_the_others_alone(tmp_path):
    spec = make_spec()
    recorder = make_recorder()
    data, ids = make_data(spec)
    holed = recorder.admit(spec, request_id="holed", path=tmp_path / "holed.safetensors")
    holed.add(rows_of(data, ids, 0, 3))
    with pytest.raises(EngineError, match="never arrived"):
        holed.finish(ids, "prefill").result(30)
    write_sample(recorder, tmp_path / "fine.safetensors", spec)
    load_hidden_states(tmp_path / "fine.safetensors")
    with pytest.raises(Exception, match="never arrived"):
        load_hidden_states(tmp_path / "holed.safetensors")
    assert (recorder.counts.admitted, recorder.counts.published, recorder.counts.failed) == (2, 1, 1)


def test_positions_outside_of_the_prompt_are_refused_at_admission(tmp_path):
    with pytest.raises(OptionError, match="rows 0 to 5"):
        make_recorder().admit(
            make_spec(window=Window(positions=(2, 7))), request_id="r", path=tmp_path / "a.safetensors"
        )


def test_finish_after_fail_and_fail_after_finish_change_nothing(tmp_path):
    spec = make_spec()
    data, ids, result = write_sample(make_recorder(), tmp_path / "a.safetensors", spec)
    recorder = make_recorder()
    capture = recorder.admit(spec, request_id="r", path=tmp_path / "b.safetensors")
    capture.fail("first word")
    capture.fail("second word")
    with pytest.raises(EngineError, match="first word"):
        capture.finish(ids, "prefill").result(30)
    assert result.path.exists()


def test_closing_tells_what_still_runs(tmp_path):
    recorder = make_recorder()
    capture = recorder.admit(make_spec(), request_id="r", path=tmp_path / "a.safetensors")
    recorder.close()
    capture.fail("the engine was closed")
    with pytest.raises(Exception, match="the engine was closed"):
        load_hidden_states(tmp_path / "a.safetensors")


def test_digests_of_the_engine_are_taken_and_a_wrong_one_is_found_by_the_reader(tmp_path):
    from layertap.errors import CorruptError
    from layertap.files.format import row_digests

    spec = make_spec()
    data, ids = make_data(spec)
    recorder = make_recorder()
    right = row_digests(data.reshape(len(ids), -1), ids)
    for name, digests in (("right", right), ("wrong", right + np.uint64(1))):
        capture = recorder.admit(spec, request_id=name, path=tmp_path / f"{name}.safetensors")
        for part in (slice(0, 4), slice(4, 6)):
            capture.add(Rows(0, part.start, ids[part], slice(0, 2), data[part], digests=digests[part]))
        capture.finish(ids, "prefill").result(30)
    load_hidden_states(tmp_path / "right.safetensors")
    with pytest.raises(CorruptError, match="6 of 6 rows"):
        load_hidden_states(tmp_path / "wrong.safetensors")
