"""`layertap extract --ray --engine vllm`: an actor of a Ray cluster on this machine, with a vLLM of its own."""

import importlib.util
import json
import os
import subprocess
import sys

import checkpoints
import pytest
import running

from layertap import open_dataset
from layertap.testing import oracle
from layertap.testing.tokenizer import byte_tokenizer

LAYERS = [0, 3, 4]


def layertap(*arguments, **environment):
    command = [sys.executable, "-c", "from layertap.cli import main; main()", *map(str, arguments)]
    env = {**os.environ, **running.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed")
def test_an_actor_with_vllm_writes_a_data_set_that_verifies_and_equals_the_oracle(checkpoint_folder, tmp_path):
    checkpoint = checkpoints.save("llama", checkpoint_folder)
    source, out = tmp_path / "in.jsonl", tmp_path / "states"
    prompts = [f"prompt number {number} " * (1 + number % 5) for number in range(60)]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    lines[7] = json.dumps({"prompt": "too long " * 900})
    source.write_text("\n".join(lines))
    asked = ["--layers", ",".join(map(str, LAYERS)), "--out", out, "--engine", "vllm", "--dtype", "float32"]
    cluster = ["--ray", "--ray-actors", 1, "--max-model-len", 256]
    code, said, log = layertap(
        "extract", checkpoint, source, *asked, *cluster, RAY_USAGE_STATS_ENABLED="0", TORCH_COMPILE_DISABLE="1"
    )
    assert code == 3, said + log  # one prompt failed
    assert "1 prompt failed" in said + log
    assert "in.jsonl line 8" in said + log
    code, said, log = layertap("verify", out, "--recompute", "20%", "--json")
    assert code == 0, said + log
    report = json.loads(said)
    assert (report["verdict"], report["damaged"], len(report["recomputed"])) == ("good", [], 12)
    dataset, model = open_dataset(out, verify=True), running.load_oracle("llama", checkpoint)
    assert dataset.indices.tolist() == [index for index in range(60) if index != 7]
    tokenizer = byte_tokenizer()
    for sample, index in zip(dataset, dataset.indices.tolist(), strict=True):
        assert sample["token_ids"].tolist() == tokenizer(prompts[index])["input_ids"]
        wanted = oracle.hidden_states(model, sample["token_ids"].tolist(), LAYERS)
        error = (sample["hidden_states"] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(error.max()) < running.TOLERANCE
