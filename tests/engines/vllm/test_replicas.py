"""Two replicas (data parallelism) with layertap's connector inside of MultiConnector; their engine processes are killed at the end.

One process tree; about a minute.
"""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
import running

from layertap.files.read import read_header


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def found(checkpoint, temporary, tmp_path_factory):
    folder = Path(__file__).parent
    storage = tmp_path_factory.mktemp("states")
    before = set(Path("/dev/shm").iterdir())
    env = {
        **os.environ,
        **running.ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "LAYERTAP_VLLM_WRITER": "process",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(
        [sys.executable, str(folder / "replicas_script.py"), str(checkpoint), str(storage)],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return {**json.loads(line.removeprefix("RESULT ")), "storage": storage, "before": before}


def test_each_replicas_files_hold_its_requests_rows_and_say_which_replica_it_is(found, checkpoint):
    model = running.load_oracle("llama", checkpoint)
    paths = set()
    for tokens, handle in found["answers"]:
        running.check_file(model, handle["hidden_states_path"], tokens[:-1], layers=range(5))
        paths.add(handle["hidden_states_path"])
    assert len(paths) == len(found["answers"])
    assert {read_header(path).info.facts["replica"] for path in paths} == {"0", "1"}


def test_both_connectors_inside_of_multiconnector_answer(found):
    assert [handle["others_answer"] for _, handle in found["answers"]] == list(range(len(found["answers"])))


def test_the_metrics_count_each_replicas_files_and_no_failure(found):
    def values(name):
        return {
            line.split('engine="')[1][0]: float(line.split()[-1])
            for line in found["metrics"]
            if line.startswith(f"{name}{{")
        }

    files, failed = values("layertap:files_total"), values("layertap:failures_total")
    assert set(files) == {"0", "1"}
    assert sum(files.values()) == len(found["answers"])
    assert all(files.values())
    assert not any(failed.values())
    assert {line.split('reason="')[1].split('"')[0] for line in found["metrics"] if "failures_total{" in line} == {
        "aborted", "disk", "engine", "exists", "rows", "other",
    }  # fmt: skip


def test_a_killed_engine_ends_with_its_own_error_and_its_reader_is_told(found):
    killed = found["killed"]
    assert killed["request"] == "EngineDeadError"
    assert "closed before the request was finished" in killed["reader"]


def test_the_writer_of_a_killed_engine_ends_and_nothing_is_left_behind(found, temporary):
    assert found["killed"]["writer_gone"]
    assert not found["killed"]["writer_is_the_engine"]
    left = [path.name for path in found["storage"].rglob("*") if path.name.endswith(".layertap-tmp")]
    assert not left
    assert not [path for path in temporary.iterdir() if "layertap" in path.name]
    appeared = set(Path("/dev/shm").iterdir()) - found["before"]
    assert not [path for path in appeared if path.name.startswith("layertap-rows-") and is_orphan(path)]


def is_orphan(folder):
    """Nobody holds its lock; engines of other tests make such folders, too."""
    try:
        with (folder / ".owner").open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
