"""Two workers on the CPU give the files of one: tensor parallel (eager) and pipeline parallel (compiled: plain eager crashes).

Each case in a process tree of its own; about a minute each. At the end one worker of the parallel ones is killed, and then in a
second engine the other one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
import running

SCRIPT = Path(__file__).with_name("parallel_script.py")
# whom to kill: the rank that writes, with its writer process, and the other one; the stage that sends and the one that writes
CASES = {
    "tp2": ({"tensor_parallel_size": 2}, {"LAYERTAP_VLLM_WRITER": "process"}, [0, 1]),
    "pp2-compiled": ({"pipeline_parallel_size": 2, "enforce_eager": False}, {}, [1, 0]),
    "compiled-writer-process": ({"enforce_eager": False}, {"LAYERTAP_VLLM_WRITER": "process"}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_files_of_several_processes_equal_the_oracle_and_a_killed_one_is_told_to_every_reader(
    case, checkpoint_folder, tmp_path
):
    options, environment, victims = CASES[case]
    checkpoint = checkpoints.save("llama", checkpoint_folder)
    asked = {
        "checkpoint": str(checkpoint),
        "storage": str(tmp_path / "states"),
        "options": {"block_size": 32, **options},
        "kill": victims,
    }
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"} if "parallel" in str(options) else {}
    env = {
        **os.environ,
        **running.ENVIRONMENT,
        **binding,
        **environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(asked)],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))  # vLLM logs to stdout too
    found = json.loads(line.removeprefix("RESULT "))
    model = running.load_oracle("llama", checkpoint)
    spans = [(slice(None), range(5)), (slice(None), [4, 0, 2]), (slice(32, 33), [1]), (slice(2, 70), range(5))]
    assert found["cached"] == [0, 0, 0, 0, 0, 64, 32, 0]  # a block that is owed in part, positions 2 to 31, isn't kept
    for ids, handle, (rows, layers) in zip(found["tokens"], found["handles"], 2 * spans, strict=True):
        running.check_file(model, handle["hidden_states_path"], ids[:-1], rows=rows, layers=layers)
    for victim, killed in zip(victims, found["killed"], strict=True):
        assert len(killed["workers"]) == 2
        assert killed["engine"] in ("EngineDeadError", "EngineError")
        assert len(killed["readers"]) == 4
        for said in killed["readers"]:
            assert "Error: " in said, said
            assert "timed out" not in said
        done = killed["done"]
        assert done["said"] == "rows" or ("Error: " in done["said"] and "timed out" not in done["said"]), done
        if done["said"] == "rows":
            running.check_file(model, done["path"], done["tokens"][:-1])
        assert killed["left"] == []
        if (case, victim) != ("pp2-compiled", 0):  # who writes in its own process and is killed can't tidy up
            assert killed["temporary"] == []
        assert killed["not_cleaned"] == []
