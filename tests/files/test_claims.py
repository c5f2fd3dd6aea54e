"""A path is handed out as a request's unless something speaks against it."""

import pytest
from file_cases import make_recorder, make_spec, write_sample

from layertap.files.claims import taken_by_another

SPEC = make_spec()


@pytest.fixture
def recorder():
    made = make_recorder()
    yield made
    made.close()


def test_a_path_is_a_requests_from_admission_to_cleanup(recorder, tmp_path):
    path = tmp_path / "a.safetensors"
    assert taken_by_another(path, "mine") is None
    write_sample(recorder, path, SPEC, request_id="mine")
    assert taken_by_another(path, "mine") is None
    (tmp_path / "a.safetensors.lock").unlink()
    assert taken_by_another(path, "mine") is None


@pytest.mark.parametrize("content", [b"", b"not a file of ours", b"\0" * 5000])
def test_a_file_that_somebody_put_there_is_anothers(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    assert "is another's" in taken_by_another(path, "mine")
    assert taken_by_another(path, "mine", overwrite=True) is None


def test_another_requests_file_is_anothers_with_and_without_its_lock(recorder, tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(recorder, path, SPEC, request_id="theirs")
    assert "is another's" in taken_by_another(path, "mine")
    (tmp_path / "a.safetensors.lock").unlink()
    assert "is another's" in taken_by_another(path, "mine")


def test_a_path_that_another_request_is_writing_is_anothers_also_to_be_overwritten(recorder, tmp_path):
    path = tmp_path / "a.safetensors"
    capture = recorder.admit(SPEC, request_id="theirs", path=path)
    for overwrite in (False, True):
        assert "being written by another request (theirs)" in taken_by_another(path, "mine", overwrite=overwrite)
    capture.fail("given up")
    with pytest.raises(Exception, match="given up"):
        capture.result.result(30)
    assert taken_by_another(path, "mine") is None  # its lock is free: ours may only be late


def test_a_dangling_link_is_anothers(tmp_path):
    path = tmp_path / "a.safetensors"
    path.symlink_to(tmp_path / "nowhere")
    assert "is another's" in taken_by_another(path, "mine")
