import os
import time

from file_cases import make_recorder, make_spec, write_sample

from layertap.files.locks import WriterLock
from layertap.files.paths import temporary_path
from layertap.files.read import load_hidden_states
from layertap.files.reap import reap


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
