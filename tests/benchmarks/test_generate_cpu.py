"""The benchmark of the generation loop runs and says what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "generate_cpu.py"


@pytest.mark.slow
def test_it_times_steps_with_rows_and_without():
    sizes = {"num-prompts": 4, "prompt-len": 16, "num-tokens": 6, "layers": 1, "hidden": 32, "rounds": 1}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in sizes.items())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])["ms_per_step"]
    assert sorted(found) == ["no capture", "output rows"]
    assert all(milliseconds > 0 for times in found.values() for milliseconds in times)
