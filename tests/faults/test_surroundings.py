"""Python -O, a plain C locale, paths that aren't UTF-8, and a script that ends with writes in flight, in new processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layertap import load_hidden_states
from layertap.testing import oracle, zoo

_SCRIPT = """
import os, sys
assert False, "-O is on, so this isn't run"
import torch
torch.set_num_threads(1)
from layertap import LLM, SamplingParams
checkpoint, storage = (os.fsdecode(bytes.fromhex(word)) for word in sys.argv[1:])
llm = LLM(checkpoint, layers=[1, 2, 4], storage=storage)
wanted = {"kv_transfer_params": {"include_output_tokens": True}}
params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, extra_args=wanted)
for output in llm.generate([[9, 10, 11], [30, 31, 32, 33]], params):
    print(os.fsencode(output.kv_transfer_params["hidden_states_path"]).hex())
results = llm.extract([list(range(8, 8 + n)) for n in range(3, 30)], storage=storage)
print(os.fsencode(next(results).path).hex())
"""  # no close: the interpreter ends while files are on their way


@pytest.mark.slow
def test_a_plain_locale_odd_paths_optimization_and_an_early_end_change_no_row(tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xff\xe9"))
    root.mkdir()
    checkpoint = zoo.save("llama", tmp_path / "model")  # the tokenizers library takes UTF-8 only
    words = [os.fsencode(path).hex() for path in (checkpoint, root / "states")]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-O", "-c", _SCRIPT, *words], capture_output=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    reference = zoo.build("llama")
    paths = [Path(os.fsdecode(bytes.fromhex(line))) for line in done.stdout.decode().split()]
    assert len(paths) == 3
    for path in (root / "states").glob("*.safetensors"):
        states = load_hidden_states(path, timeout=0)
        exact = oracle.hidden_states(reference, states["token_ids"].tolist(), [1, 2, 4])
        assert ((states["hidden_states"] - exact).norm(dim=-1) <= 1e-4 * exact.norm(dim=-1)).all()
    assert all(path.exists() for path in paths)
    left = [path.name for path in (root / "states").iterdir() if path.name.startswith(".")]
    assert not left


@pytest.mark.slow
def test_commands_take_paths_that_are_not_utf_8_in_a_plain_locale(tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xff\xe9"))
    root.mkdir()
    checkpoint = zoo.save("llama", tmp_path / "model")  # the tokenizers library takes UTF-8 only
    (root / "in.jsonl").write_text('{"prompt_token_ids": [9, 10, 11]}\n')
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    states = os.fspath(root / "states")
    for words in (
        ["extract", os.fspath(checkpoint), os.fspath(root / "in.jsonl"), "--layers", "1,4", "--out", states, "-q"],
        ["verify", states],
        ["inspect", states],
        ["clean", states],
    ):
        command = [sys.executable, "-c", "from layertap.cli import main; main()", *words]
        done = subprocess.run(command, capture_output=True, env=environment, timeout=300)
        assert done.returncode == 0, (words[0], done.stderr.decode(errors="replace")[-2000:])
