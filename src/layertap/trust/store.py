"""Can this folder hold hidden states: atomic renames, locks that wake, sync, room, speed. Needs no model."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from layertap.assembly import Rows
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec
from layertap.errors import LayertapError
from layertap.files.locks import WriterLock, is_held
from layertap.files.paths import QUARANTINE_SUFFIX
from layertap.files.read import read_file
from layertap.trust.findings import Report, State
from layertap.writing.recorder import Recorder

_SECTION = "store"
_SPEED_BYTES = 64 << 20
_NUM_SPEED_FILES = 8


def examine_store(report: Report, folder: Path) -> None:
    """Try everything in a folder of its own inside `folder`, which is removed again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".layertap-doctor-", dir=folder))
    except OSError as exc:
        report.add(_SECTION, "writable", "bad", f"{folder}: {exc.strerror}")
        return
    try:
        _links_and_renames(report, scratch)
        _locks(report, scratch)
        _sync(report, scratch)
        _room(report, folder)
        _quarantine(report, folder)
        _speed(report, scratch)
    except OSError as exc:
        report.add(_SECTION, "examination", "bad", f"{folder}: {exc}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _links_and_renames(report: Report, scratch: Path) -> None:
    one, two = scratch / "one", scratch / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    with open(two, "rb") as held:
        one.replace(two)
        whole = two.read_bytes() == b"1" and held.read() == b"2"
    report.add(
        _SECTION,
        "rename",
        "good" if whole else "bad",
        "replaces a file at once, open readers keep the old one" if whole else "doesn't replace a file as POSIX says",
    )
    try:
        os.link(two, scratch / "three")
    except OSError as exc:
        text = f"hard links: {exc.strerror}; two programs that publish one name at once can't be told apart"
        report.add(_SECTION, "no overwriting", "note", text)
        return
    with contextlib.suppress(FileExistsError):
        os.link(two, scratch / "three")
        report.add(_SECTION, "no overwriting", "bad", "a hard link replaced an existing name")
        return
    report.add(_SECTION, "no overwriting", "good", "an existing name is never replaced")


def _locks(report: Report, scratch: Path) -> None:
    path = scratch / "locked"
    lock = WriterLock(path, "doctor", patience_seconds=0)
    held = is_held(lock.path)
    fd = os.open(lock.path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        exclusive = False
    except BlockingIOError:
        exclusive = True
    except OSError as exc:
        report.add(
            _SECTION,
            "locks",
            "note",
            f"flock: {exc.strerror}; dead writers are told by their process id, on this host only",
        )
        return
    finally:
        os.close(fd)
    lock.release()
    good = held and exclusive and not is_held(lock.path)
    text = (
        "readers wait for a writer and wake when it ends"
        if good
        else "flock is granted twice: readers can't wait for a writer"
    )
    report.add(_SECTION, "locks", "good" if good else "bad", text)


def _sync(report: Report, scratch: Path) -> None:
    path = scratch / "synced"
    took = []
    for _ in range(3):
        began = time.perf_counter()
        with open(path, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        took.append(time.perf_counter() - began)
    report.add(_SECTION, "sync", "good", f"a small file is safe from a power loss after {min(took) * 1e3:.1f} ms")


def _room(report: Report, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    least = StoreOptions().min_free_bytes
    state: State = "good" if free > 2 * least else "bad" if free < least else "note"
    report.add(
        _SECTION,
        "room",
        state,
        f"{free / 2**30:.1f} GiB free at {folder}; requests are refused below {least / 2**30:.0f} GiB",
    )


def _quarantine(report: Report, folder: Path) -> None:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.endswith(QUARANTINE_SUFFIX))
    if names:
        text = f"{len(names)} files were found wrong and are kept aside, the first is {names[0]}; its .error says why"
        report.add(_SECTION, "quarantine", "note", text)


def _speed(report: Report, scratch: Path) -> None:
    """Through the writer itself, checksums and all, and read back."""
    spec = CaptureSpec(
        layers=(1, 2, 3, 4), dtype="bfloat16", hidden_size=4096, prompt_len=_SPEED_BYTES // _NUM_SPEED_FILES // 32768
    )
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 0x7F00, (spec.prompt_len, 4, 4096), np.uint16).view(np.uint8)
    ids = rng.integers(0, 50_000, spec.prompt_len)
    recorder = Recorder(StoreOptions(min_free_bytes=0), model="doctor", num_layers=4, facts={})
    try:
        began = time.perf_counter()
        futures = []
        for n in range(_NUM_SPEED_FILES):
            capture = recorder.admit(spec, request_id=str(n), path=scratch / f"{n}.safetensors")
            capture.add(Rows(0, 0, ids, slice(0, 4), rows))
            futures.append(capture.finish(ids, "prefill"))
        paths = [future.result(120).path for future in futures]
        wrote = time.perf_counter() - began
        began = time.perf_counter()
        right = all(path is not None and read_file(path).rows.tobytes() == rows.tobytes() for path in paths)
        read = time.perf_counter() - began
    except LayertapError as exc:
        report.add(_SECTION, "write and read", "bad", str(exc))
        return
    finally:
        recorder.close()
    size = rows.nbytes * _NUM_SPEED_FILES
    text = f"{size / wrote / 1e9:.2f} GB/s written, {size / read / 1e9:.2f} GB/s read and checked (page cache)"
    report.add(
        _SECTION, "write and read", "good" if right else "bad", text if right else "a file came back with other bytes"
    )
