"""A writer that dies at any moment leaves complete samples and nothing that looks like one; the next run finishes."""

import contextlib
import os
import random
import signal
import sys

import pytest
from dataset_cases import ROW_BYTES, assert_holds, make_manifest, write_dataset

from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions
from layertap.errors import MissingError

SMALL = ShardOptions(shard_bytes=25 * ROW_BYTES)
SAMPLES = range(6)
KINDS = {
    "shards": make_manifest(),
    "files": make_manifest("files"),
    "compressed": make_manifest(options={"compress": "planes+zstd", "share_prefixes": True}),
}


def run_and_die(folder, kind, *, at_event=None, after_seconds=None):
    """Write in a forked child that is killed; true if it came to the end before.

    The child kills itself at its n-th access to a name in the folder (open, rename, link, unlink, truncate, ...), or is killed
    by a timer at any instruction.
    """
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return not os.WIFSIGNALED(status)
    try:
        if after_seconds is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, after_seconds)
        if at_event is not None:
            left = at_event

            def watch(event, args):
                nonlocal left
                if any(isinstance(arg, str | os.PathLike) and os.fspath(arg).startswith(str(folder)) for arg in args):
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(watch)
        write_dataset(folder, SAMPLES, manifest=KINDS[kind], options=SMALL)
    except BaseException:  # noqa: BLE001 - a forked child must not go on as a second pytest
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def check_what_is_left(folder):
    """What can be opened is whole; returns how much it is."""
    with contextlib.suppress(MissingError):
        found = open_dataset(folder, verify=True)
        assert_holds(folder, found.indices.tolist())
        return len(found)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_writer_killed_at_each_of_its_accesses_leaves_only_complete_samples(tmp_path, kind):
    counts = []
    event = 0
    ended = False
    while not ended:
        folder = tmp_path / f"states{event}"
        ended = run_and_die(folder, kind, at_event=event)
        counts.append(check_what_is_left(folder))
        write_dataset(folder, SAMPLES, manifest=KINDS[kind], options=SMALL)
        assert_holds(folder, SAMPLES)
        assert not list(folder.glob("**/.*"))
        event += 1
    assert event > 30
    # samples that were there never go away, and the moments cover all of the run
    assert counts == sorted(counts)
    assert counts[-1] == len(SAMPLES)
    assert len(set(counts)) > 1


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_killed_again_and_again_at_random_moments_comes_to_its_end(tmp_path, kind):
    folder = tmp_path / "states"
    moments = random.Random(kind)
    before = 0
    for _ in range(25):
        if run_and_die(folder, kind, after_seconds=moments.uniform(0.001, 0.05)):
            break
        now = check_what_is_left(folder)
        assert now >= before
        before = now
    write_dataset(folder, SAMPLES, manifest=KINDS[kind], options=SMALL)
    assert_holds(folder, SAMPLES)
    assert not list(folder.glob("**/.*"))
