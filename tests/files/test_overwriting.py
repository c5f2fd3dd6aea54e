"""A reader of a path that is being replaced gets the new file or the reason, never the old file."""

import os
import signal

import pytest
from file_cases import make_data, make_recorder, make_spec, write_sample

from layertap.assembly import Rows
from layertap.errors import HiddenStatesError, WriterDiedError
from layertap.files.read import cleanup_hidden_states, load_hidden_states


def test_a_failed_replacement_is_reported_and_the_old_file_is_not_taken_for_the_new_one(tmp_path):
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    old, _, _ = write_sample(recorder, path, make_spec())
    capture = recorder.admit(make_spec(), request_id="second", path=path, overwrite=True)
    capture.fail("the model fell over")
    recorder.close()
    with pytest.raises(HiddenStatesError, match="fell over"):
        load_hidden_states(path)
    cleanup_hidden_states(path, keep_hidden_states=True)
    assert load_hidden_states(path)["hidden_states"].numpy().tobytes() == old.tobytes()


def test_a_writer_that_dies_before_it_replaces_is_reported(tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    child = os.fork()
    if child == 0:
        make_recorder().admit(make_spec(), request_id="second", path=path, overwrite=True)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(WriterDiedError, match="before it replaced"):
        load_hidden_states(path)


def test_a_replacement_that_succeeds_is_delivered_also_after_one_that_failed(tmp_path):
    path, recorder, spec = tmp_path / "a.safetensors", make_recorder(), make_spec()
    write_sample(recorder, path, spec)
    failed = recorder.admit(spec, request_id="second", path=path, overwrite=True)
    failed.fail("reason")
    assert failed.result.exception(30) is not None
    new, _, _ = write_sample(recorder, path, spec, seed=9, overwrite=True)
    assert load_hidden_states(path)["hidden_states"].numpy().tobytes() == new.tobytes()


def test_a_file_put_there_by_hand_after_a_failure_is_read(tmp_path):
    path, recorder, spec = tmp_path / "a.safetensors", make_recorder(), make_spec()
    recorder.admit(spec, request_id="r", path=path).fail("reason")
    recorder.close()
    rows, _, _ = write_sample(make_recorder(), tmp_path / "b.safetensors", spec)
    (tmp_path / "b.safetensors").replace(path)
    assert load_hidden_states(path)["hidden_states"].numpy().tobytes() == rows.tobytes()


def test_a_sync_that_fails_after_the_rename_leaves_no_file_behind(tmp_path, monkeypatch):
    from layertap.files import publish

    def broken(_folder):
        raise OSError(5, "Input/output error", "the folder")

    monkeypatch.setattr(publish, "sync_folder", broken)
    path, recorder, spec = tmp_path / "a.safetensors", make_recorder(fsync=True), make_spec()
    with pytest.raises(HiddenStatesError, match="Input/output"):
        write_sample(recorder, path, spec)
    assert not path.exists()
    with pytest.raises(HiddenStatesError, match="Input/output"):
        load_hidden_states(path)


def test_what_only_close_reports_fails_the_request_before_anything_is_published(tmp_path, monkeypatch):
    """Network file systems keep ENOSPC for close()."""
    real, path, spec = os.close, tmp_path / "a.safetensors", make_spec()
    recorder = make_recorder()
    rows, ids = make_data(spec)
    capture = recorder.admit(spec, request_id="r", path=path)
    temporary = capture._sink._file.temporary.stat().st_ino

    def full(fd):
        late = os.fstat(fd).st_ino == temporary
        real(fd)
        if late:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "close", full)
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    with pytest.raises(HiddenStatesError, match="No space"):
        capture.finish(ids, "prefill").result(30)
    monkeypatch.setattr(os, "close", real)
    assert not path.exists()
    with pytest.raises(HiddenStatesError, match="No space"):
        load_hidden_states(path)
