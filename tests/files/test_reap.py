import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from file_cases import make_recorder, make_spec, write_sample

from layertap.files.locks import WriterLock
from layertap.files.paths import TEMP_SUFFIX, temporary_path
from layertap.files.read import load_hidden_states
from layertap.files.reap import reap, remove_idle
from layertap.files.tags import expire_tags, reserve_tag


class AtFlock:
    """Something happens right before a file is locked for the first time: another process has its turn there."""

    def __init__(self, monkeypatch, suffix, what):
        self.met = []
        real = fcntl.flock

        def flock(fd, operation):
            path = Path(os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}"))
            if path.name.endswith(suffix) and not self.met:
                self.met.append(path)
                what(path)
            return real(fd, operation)

        monkeypatch.setattr(fcntl, "flock", flock)


def test_leftovers_of_a_dead_process_go_and_everything_alive_stays(tmp_path):
    recorder = make_recorder()
    write_sample(recorder, tmp_path / "done.safetensors", make_spec())
    running = recorder.admit(make_spec(), request_id="r", path=tmp_path / "running.safetensors")
    leftover = temporary_path(tmp_path / "dead.safetensors")
    leftover.write_bytes(b"x" * 100)
    (tmp_path / "mine.txt").write_text("not ours")
    before = set(os.listdir(tmp_path))
    assert reap(tmp_path, dry_run=True).temporaries == [leftover]
    assert set(os.listdir(tmp_path)) == before
    found = reap(tmp_path)
    assert (found.temporaries, found.freed_bytes) == ([leftover], 100)
    assert set(os.listdir(tmp_path)) == before - {leftover.name}
    running.fail("end")


def test_what_a_killed_process_left_of_a_tags_record_goes_with_the_old_records(tmp_path):
    record = reserve_tag(str(tmp_path), "mine", "r", [{"hidden_states_path": str(tmp_path / "gone.safetensors")}])
    leftover = temporary_path(record)
    leftover.touch()
    assert expire_tags(str(tmp_path), time.time() - 100) == 0
    assert leftover.exists()
    assert expire_tags(str(tmp_path), time.time() + 100) == 1
    assert not list(record.parent.iterdir())


def test_expired_files_go_but_not_while_they_are_written(tmp_path):
    recorder = make_recorder()
    write_sample(recorder, tmp_path / "old.safetensors", make_spec())
    recorder.admit(make_spec(), request_id="r", path=tmp_path / "failed.safetensors").fail("reason")
    busy = WriterLock(tmp_path / "busy.safetensors", "r")
    (tmp_path / "busy.safetensors").write_bytes(b"being replaced")
    recorder.pool.close()
    later = time.time() + 100
    assert reap(tmp_path, ttl_seconds=1000, now=later).expired == []
    found = reap(tmp_path, ttl_seconds=50, now=later)
    assert sorted(path.name for path in found.expired) == ["failed.safetensors.error", "old.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["busy.safetensors", "busy.safetensors.lock"]
    busy.release()


def test_without_a_ttl_published_files_are_never_removed(tmp_path):
    write_sample(make_recorder(), tmp_path / "a.safetensors", make_spec())
    reap(tmp_path, now=time.time() + 1e9)
    load_hidden_states(tmp_path / "a.safetensors")


def test_lock_files_of_other_programs_are_never_removed(tmp_path):
    for name, content in (
        ("uv.lock", "version = 1"),
        ("empty.lock", ""),
        ("npm.safetensors.lock", "{}"),
        ("x.lock", "[]"),
    ):
        (tmp_path / name).write_text(content)
    lock = WriterLock(tmp_path / "dead.safetensors", "r")
    lock.release()
    (tmp_path / "died-at-once.safetensors.lock").touch()
    reap(tmp_path, ttl_seconds=1, now=time.time() + 1e6)
    assert sorted(os.listdir(tmp_path)) == ["empty.lock", "npm.safetensors.lock", "uv.lock", "x.lock"]


def test_a_file_that_the_reaper_meets_before_its_writer_has_locked_it_is_begun_anew(tmp_path, monkeypatch):
    meeting = AtFlock(monkeypatch, TEMP_SUFFIX, lambda path: reap(tmp_path))
    _, ids, _ = write_sample(make_recorder(), tmp_path / "a.safetensors", make_spec())
    assert meeting.met
    assert not meeting.met[0].exists()
    assert load_hidden_states(tmp_path / "a.safetensors")["token_ids"].tolist() == ids.tolist()


def test_a_file_that_is_looked_at_while_its_writer_locks_it_is_locked_all_the_same(tmp_path, monkeypatch):
    looks = []

    def look(path):
        fd = os.open(path, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        looks.append(threading.Timer(0.05, os.close, [fd]))
        looks[0].start()

    meeting = AtFlock(monkeypatch, TEMP_SUFFIX, look)
    capture = make_recorder().admit(make_spec(), request_id="r", path=tmp_path / "a.safetensors")
    looks[0].join()
    assert reap(tmp_path).temporaries == []
    assert meeting.met[0].exists()
    capture.discard()


def test_a_reason_that_is_being_written_down_is_no_leftover(tmp_path, monkeypatch):
    capture = make_recorder().admit(make_spec(), request_id="r", path=tmp_path / "a.safetensors")
    real = os.replace

    def replace(source, target):
        assert reap(tmp_path).temporaries == []
        return real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    capture.fail("the moon was in the way")
    with pytest.raises(Exception, match="the moon"):
        load_hidden_states(tmp_path / "a.safetensors", timeout=30)
    assert (tmp_path / "a.safetensors.error").exists()


def test_an_expired_file_that_is_replaced_while_the_reaper_looks_at_it_stays(tmp_path, monkeypatch):
    path, recorder = tmp_path / "a.safetensors", make_recorder()
    write_sample(recorder, path, make_spec())
    os.utime(path, (1, 1))
    written = []
    AtFlock(
        monkeypatch,
        ".lock",
        lambda _: written.append(write_sample(recorder, path, make_spec(), seed=1, overwrite=True)),
    )
    assert reap(tmp_path, ttl_seconds=1000).expired == []
    ((_, ids, _),) = written
    assert load_hidden_states(path)["token_ids"].tolist() == ids.tolist()


def test_a_lock_is_never_taken_from_a_writer_that_begins_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    refused = []

    def begin(_):
        with pytest.raises(FileExistsError, match="is being written"):
            WriterLock(path, "r", patience_seconds=0.0)
        refused.append(True)

    AtFlock(monkeypatch, path.name, begin)
    assert remove_idle(path) > 0
    assert refused
    assert list(tmp_path.iterdir()) == []


def test_on_nfs_where_an_exclusive_lock_wants_a_writable_descriptor_files_go_too(tmp_path, monkeypatch):
    real = fcntl.flock

    def flock(fd, operation):
        if operation & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    recorder = make_recorder()
    write_sample(recorder, tmp_path / "deleted.safetensors", make_spec())
    write_sample(recorder, tmp_path / "expired.safetensors", make_spec())
    temporary_path(tmp_path / "dead.safetensors").touch()
    assert remove_idle(tmp_path / "deleted.safetensors") > 0
    reap(tmp_path, ttl_seconds=50, now=time.time() + 100)
    assert list(tmp_path.iterdir()) == []


def test_without_flock_the_files_of_a_living_writer_can_go_and_what_it_writes_stays(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    recorder = make_recorder()
    write_sample(recorder, tmp_path / "deleted.safetensors", make_spec())
    write_sample(recorder, tmp_path / "expired.safetensors", make_spec())
    recorder.admit(make_spec(), request_id="r", path=tmp_path / "failed.safetensors").fail("a reason")
    running = recorder.admit(make_spec(), request_id="r", path=tmp_path / "running.safetensors")
    recorder.pool.close()
    assert remove_idle(tmp_path / "deleted.safetensors") > 0
    assert remove_idle(tmp_path / "running.safetensors") is None
    reap(tmp_path, ttl_seconds=50, now=time.time() + 100)
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2
    assert left[0].startswith(".running.safetensors")
    assert left[1] == "running.safetensors.lock"
    running.discard()


def test_what_cannot_be_removed_is_not_said_to_be(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    temporary_path(path).touch()

    def refuse(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    found = reap(tmp_path, ttl_seconds=50, now=time.time() + 100)
    assert (found.temporaries, found.expired, found.freed_bytes) == ([], [], 0)
    with pytest.raises(PermissionError):
        remove_idle(path)
