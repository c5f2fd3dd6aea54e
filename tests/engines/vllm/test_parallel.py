"""Two workers on the CPU give the files of one: tensor parallel (eager) and pipeline parallel (compiled: plain eager crashes).

Each case in a process tree of its own; about a minute each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
import running

_SCRIPT = """
import json, sys
sys.path.insert(0, {folder!r})
import running
if __name__ == "__main__":
    from pathlib import Path
    extra = {{"prefix_rows_bytes": 10_000_000}}
    with running.running(Path({checkpoint!r}), Path({storage!r}), extra, **{options!r}) as llm:
        outputs = []
        for _ in range(2):  # the second time with rows that were kept
            outputs += llm.generate(running.prompts([5, 90, 33, 120]), [
                running.params(7, include_output_tokens=True),
                running.params(7, include_output_tokens=True, layers=[4, 0, 2]),
                running.params(1, layers=[1], positions="last"),
                running.params(3, positions=[2, 70]),
            ], use_tqdm=False)
    found = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    cached = [o.num_cached_tokens for o in outputs]
    print("\\nRESULT", json.dumps([found, [o.kv_transfer_params for o in outputs], cached]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2, "enforce_eager": False}, {}),
        ({"enforce_eager": False}, {"LAYERTAP_VLLM_WRITER": "process"}),
    ],
    ids=["tp2", "pp2-compiled", "compiled-writer-process"],
)
def test_files_of_several_processes_equal_the_oracle(options, environment, checkpoint_folder, tmp_path):
    checkpoint = checkpoints.save("llama", checkpoint_folder)
    script = tmp_path / "run.py"
    script.write_text(
        _SCRIPT.format(
            folder=str(Path(__file__).parent),
            checkpoint=str(checkpoint),
            storage=str(tmp_path / "states"),
            options={"block_size": 32, **options},
        )
    )
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
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))  # vLLM logs to stdout too
    tokens, handles, cached = json.loads(result.removeprefix("RESULT "))
    model = running.load_oracle("llama", checkpoint)
    spans = [(slice(None), range(5)), (slice(None), [4, 0, 2]), (slice(32, 33), [1]), (slice(2, 70), range(5))]
    assert cached == [0, 0, 0, 0, 0, 64, 32, 0]  # a block that is owed in part, positions 2 to 31, isn't kept
    for ids, handle, (rows, layers) in zip(tokens, handles, 2 * spans, strict=True):
        running.check_file(model, handle["hidden_states_path"], ids[:-1], rows=rows, layers=layers)
