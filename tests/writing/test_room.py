import shutil

import pytest
from file_cases import make_spec, write_sample

from layertap.capture.options import StoreOptions
from layertap.errors import StoreFullError
from layertap.writing.recorder import Recorder
from layertap.writing.room import StoreRoom


def make_room(folder, **options):
    return StoreRoom(StoreOptions(shared_storage_path=str(folder), min_free_bytes=0, **options))


def test_the_quota_counts_files_and_what_running_requests_may_write(tmp_path):
    (tmp_path / "old").write_bytes(b"x" * 400)
    room = make_room(tmp_path, max_storage_bytes=1000)
    first = room.reserve(tmp_path / "a", 500)
    with pytest.raises(StoreFullError, match="max_storage_bytes allows 1000"):
        room.reserve(tmp_path / "b", 200)
    first.settle(100)
    first.settle(100)
    assert (room.used_bytes, room.reserved_bytes) == (500, 0)
    room.reserve(tmp_path / "b", 500).settle(0)
    room.removed(400)
    assert room.used_bytes == 100
    assert room.recount() == 400


def test_the_reaper_has_its_chance_before_a_refusal(tmp_path):
    (tmp_path / "old").write_bytes(b"x" * 400)
    room = make_room(tmp_path, max_storage_bytes=500)
    asked = []

    def make_space(num_bytes):
        asked.append(num_bytes)
        (tmp_path / "old").unlink()
        room.recount()

    room.make_room = make_space
    room.reserve(tmp_path / "a", 300)
    assert asked == [200]


def test_other_folders_are_no_part_of_the_quota(tmp_path):
    room = make_room(tmp_path / "store", max_storage_bytes=10)
    room.reserve(tmp_path / "elsewhere" / "a", 1000)


def test_free_space_is_kept_and_running_requests_count_where_asked(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    free = usage.free
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)  # others write to this disk, too
    room = StoreRoom(StoreOptions(shared_storage_path=str(tmp_path), min_free_bytes=free // 2))
    room.reserve(tmp_path / "a", free // 3)
    room.reserve(tmp_path / "b", free // 3)
    room.counts_running = True
    with pytest.raises(StoreFullError, match="min_free_bytes keeps"):
        room.reserve(tmp_path / "c", free // 3)


def test_a_capture_gives_back_what_it_did_not_write(tmp_path):
    recorder = Recorder(
        StoreOptions(shared_storage_path=str(tmp_path), min_free_bytes=0, max_storage_bytes=10_000_000),
        model="m",
        num_layers=4,
        facts={},
    )
    assert recorder.room.used_bytes == 0
    failed = recorder.admit(make_spec(), request_id="f", path=tmp_path / "f.safetensors")
    assert recorder.room.reserved_bytes > 0
    failed.fail("reason")
    recorder.admit(make_spec(), request_id="d", path=tmp_path / "d.safetensors").discard()
    write_sample(recorder, tmp_path / "done.safetensors", make_spec())
    recorder.close()
    assert recorder.room.reserved_bytes == 0
    assert recorder.room.used_bytes > 0


def test_what_others_removed_is_noticed_before_a_refusal(tmp_path):
    """A reaper in another process, as with vLLM: this one only ever adds."""
    room = make_room(tmp_path, max_storage_bytes=1000)
    for number in range(10):
        room.reserve(tmp_path / "a", 400).settle(300)
        (tmp_path / f"{number}").write_bytes(b"x" * 300)
        (tmp_path / f"{number}").unlink()
    assert room.used_bytes <= 1000
