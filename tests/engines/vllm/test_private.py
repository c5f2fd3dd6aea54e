"""Folders in memory go with their processes, however those end, and never before."""

import os
import signal
import subprocess
import sys
import time

from layertap.engines.vllm.private import PrivateFolder

HOLDER = """
import signal, sys
from pathlib import Path
from layertap.engines.vllm.private import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
(folder.path / "rows").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
if sys.argv[2] == "wait":
    signal.pause()
"""


def holder(parent, then):
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(parent), then], stdout=subprocess.PIPE, text=True)


def age(path):
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def test_a_killed_processs_folder_is_removed_by_the_next_one_and_a_living_ones_is_not(tmp_path):
    with holder(tmp_path, "wait") as killed, holder(tmp_path, "wait") as alive:
        gone, kept = (process.stdout.readline().strip() for process in (killed, alive))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        for path in (gone, kept):
            age(path)
        mine = PrivateFolder(tmp_path)
        assert sorted(map(str, tmp_path.iterdir())) == sorted([kept, str(mine.path)])
        mine.remove()
        mine.remove()
        assert list(map(str, tmp_path.iterdir())) == [kept]
        alive.kill()


def test_a_folder_goes_with_its_interpreter(tmp_path):
    with holder(tmp_path, "end") as process:
        assert process.stdout.readline().strip().startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_its_parents_folder_alone(tmp_path):
    folder = PrivateFolder(tmp_path)
    child = os.fork()
    if not child:
        folder.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir()
    folder.remove()


def test_a_folder_that_was_just_made_or_isnt_ours_is_left_alone(tmp_path):
    just_made = tmp_path / "layertap-rows-new"
    just_made.mkdir()
    (just_made / ".owner").touch()
    unowned = tmp_path / "layertap-rows-old"
    unowned.mkdir()
    age(unowned)
    PrivateFolder(tmp_path).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layertap-rows-new", "layertap-rows-old"]
