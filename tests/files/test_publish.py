"""Publication: all or nothing, never over an existing file unless asked, the umask's mode, and full or broken disks."""

import os
import stat
import subprocess

import pytest
from file_cases import make_data, make_recorder, make_spec, write_sample

from layertap.assembly import Rows
from layertap.errors import HiddenStatesError, StoreFullError, TargetExistsError, WaitTimeoutError, WriterDiedError
from layertap.files.read import load_hidden_states, read_header


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o664)])
def test_the_mode_is_the_umasks_and_never_world_writable(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_sample(make_recorder(), tmp_path / "a.safetensors", make_spec())
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "a.safetensors").st_mode) == mode
    assert stat.S_IMODE(os.stat(tmp_path / "a.safetensors.lock").st_mode) == mode


def test_an_existing_target_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("precious")
    with pytest.raises(TargetExistsError, match="exists already"):
        make_recorder().admit(make_spec(), request_id="r", path=path)
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["a.safetensors"]
    with pytest.raises(FileExistsError):
        make_recorder().admit(make_spec(), request_id="r", path=path)


def test_a_dangling_link_is_an_existing_target(tmp_path):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TargetExistsError):
        make_recorder().admit(make_spec(), request_id="r", path=tmp_path / "a.safetensors")


def test_a_target_that_came_into_being_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "a.safetensors"
    spec = make_spec()
    rows, ids = make_data(spec)
    capture = make_recorder().admit(spec, request_id="r", path=path)
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    path.write_text("precious")
    with pytest.raises(TargetExistsError, match="came into being meanwhile"):
        capture.finish(ids, "prefill").result(30)
    assert path.read_text() == "precious"


def test_overwrite_replaces_by_rename_and_open_mappings_stay_valid(tmp_path):
    path = tmp_path / "a.safetensors"
    recorder = make_recorder()
    write_sample(recorder, path, make_spec(), seed=1)
    old = path.read_bytes()
    with open(path, "rb") as mapped:
        rows, ids, _ = write_sample(recorder, path, make_spec(), seed=2, overwrite=True)
        assert mapped.read() == old
    assert load_hidden_states(path)["token_ids"].tolist() == ids.tolist()


def test_nothing_that_looks_finished_is_there_before_the_end(tmp_path):
    path = tmp_path / "a.safetensors"
    spec = make_spec()
    rows, ids = make_data(spec)
    recorder = make_recorder()
    capture = recorder.admit(spec, request_id="r", path=path)
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    recorder.pool.close()  # the rows are on disk now
    hidden = [name for name in names(tmp_path) if name != "a.safetensors.lock"]
    assert len(hidden) == 1
    assert hidden[0].startswith(".")
    assert not hidden[0].endswith(".safetensors")
    capture.fail("closed")
    assert names(tmp_path) == ["a.safetensors.error", "a.safetensors.lock"]


def test_a_new_attempt_clears_the_old_error(tmp_path):
    path = tmp_path / "a.safetensors"
    recorder = make_recorder()
    recorder.admit(make_spec(), request_id="r", path=path).fail("first attempt")
    with pytest.raises(HiddenStatesError, match="first attempt"):
        load_hidden_states(path)
    write_sample(recorder, path, make_spec())
    load_hidden_states(path)
    assert names(tmp_path) == ["a.safetensors", "a.safetensors.lock"]


def test_a_window_of_generated_tokens_that_is_known_only_at_the_end_moves_to_the_front(tmp_path):
    """`positions: last` with output: the file holds one row, the last one owed."""
    from layertap.capture.request import Window

    path = tmp_path / "a.safetensors"
    spec = make_spec(num_rows=4, max_tokens=10, window=Window(positions="last", include_output=True))
    rows, ids = make_data(spec, num_rows=8)
    capture = make_recorder().admit(spec, request_id="r", path=path)
    capture.add(Rows(0, 0, ids[:4], slice(0, 2), rows[:4]))
    for position in range(4, 7):
        one = slice(position, position + 1)
        capture.add(Rows(position, position, ids[one], slice(0, 2), rows[one]))
    result = capture.finish(ids, "length").result(30)
    assert (result.info.first_position, result.info.num_rows, result.info.num_tokens) == (6, 1, 8)
    loaded = load_hidden_states(path)
    assert loaded["token_ids"].tolist() == [ids[6]]
    assert loaded["hidden_states"].numpy().tobytes() == rows[6].tobytes()


def test_a_read_only_folder_is_refused_at_admission(tmp_path):
    target = tmp_path / "file"
    target.write_text("")
    with pytest.raises(OSError, match="[Nn]ot a directory|exists"):
        make_recorder().admit(make_spec(), request_id="r", path=target / "a.safetensors")


def test_a_folder_deleted_on_the_way_is_the_captures_own_failure(tmp_path):
    folder = tmp_path / "store"
    spec = make_spec()
    rows, ids = make_data(spec)
    recorder = make_recorder()
    capture = recorder.admit(spec, request_id="r", path=folder / "a.safetensors")
    subprocess.run(["rm", "-r", str(folder)], check=True)
    capture.add(Rows(0, 0, ids, slice(0, 2), rows))
    with pytest.raises(HiddenStatesError, match="No such file"):
        capture.finish(ids, "prefill").result(30)
    write_sample(recorder, tmp_path / "b.safetensors", spec)  # the recorder goes on


def test_too_little_room_is_said_before_anything_runs(tmp_path):
    with pytest.raises(StoreFullError, match="no room for"):
        make_recorder(min_free_bytes=1 << 62).admit(make_spec(), request_id="r", path=tmp_path / "a.safetensors")
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_on_a_full_disk_every_affected_reader_gets_the_reason_and_nothing_else_is_lost(small_disk):
    spec = make_spec(num_rows=64, hidden_size=64)  # 32 KiB of rows, 36 KiB of file
    recorder = make_recorder(num_writer_threads=4)
    captures = []
    for number in range(12):
        try:
            captures.append(
                (number, recorder.admit(spec, request_id=f"r{number}", path=small_disk / f"{number}.safetensors"))
            )
        except OSError as exc:
            assert exc.errno == 28  # so full that not even the request can be admitted
    assert len(captures) > 6
    written, failed = {}, 0
    for number, capture in captures:
        rows, ids = make_data(spec, seed=number)
        capture.add(Rows(0, 0, ids, slice(0, 2), rows))
        capture.finish(ids, "prefill")
        written[number] = ids.tolist()
    for number, capture in captures:
        if capture.result.exception(60) is None:
            assert load_hidden_states(capture.path)["token_ids"].tolist() == written[number]
        else:
            failed += 1
            with pytest.raises(HiddenStatesError, match="No space left on device"):
                load_hidden_states(capture.path, timeout=30)
    assert 0 < failed < len(captures)
    assert not [name for name in names(small_disk) if name.startswith(".")]  # nothing half-written stays


def test_a_header_that_is_not_there_yet_is_told_from_one_that_will_not_come(tmp_path):
    path = tmp_path / "a.safetensors"
    capture = make_recorder().admit(make_spec(), request_id="r", path=path)
    with pytest.raises(WaitTimeoutError, match="still being written; load_hidden_states waits"):
        read_header(path)
    capture.fail("given up")
    for read in (load_hidden_states, read_header):  # the first waits until it is on record
        with pytest.raises(HiddenStatesError, match="given up"):
            read(path)
    (tmp_path / "b.safetensors.lock").write_text("{}")
    with pytest.raises(WriterDiedError, match="ended before it was published"):
        read_header(tmp_path / "b.safetensors")
