"""The zoo on vLLM: a dozen kinds of block here; `python tests/conformance/vllm_zoo.py` runs them all."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = {
    "llama": "fused residual",
    "gpt2": "bare tensors, learned positions",
    "opt": "bare tensors",
    "cohere": "parallel attention, a stale residual",
    "stablelm": "a stale residual",
    "exaone4": "post-norm, a stale residual",
    "granitemoehybrid": "state-space and attention, a stale residual",
    "gemma2": "sandwich norms",
    "gemma4_text": "a bare pair",
    "mixtral": "experts",
    "phimoe": "experts, a stale residual",
    "deepseek_v3": "latent attention, groups of experts",
    "gpt_oss": "experts and attention sinks",
    "gptj": "parallel attention, a bare tensor",
    "falcon_h1": "attention and state-space side by side",
    "olmo2": "vLLM's Transformers backend",
}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed")
@pytest.mark.timeout(1500)
def test_rows_of_every_kind_of_block_equal_the_oracles(tmp_path):
    script = Path(__file__).with_name("vllm_zoo.py")
    done = subprocess.run(
        [sys.executable, str(script), *KINDS], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["name"]: line for line in map(json.loads, done.stdout.strip().splitlines())}
    assert {name: line["status"] for name, line in found.items()} == dict.fromkeys(KINDS, "ok"), found
