import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["train_eagle3_cpu.py", "train_streaming_cpu.py"])
def test_the_example_trains_a_head_and_its_loss_falls(name):
    script = Path(__file__).parents[2] / "examples" / name
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
