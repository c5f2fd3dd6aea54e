import subprocess
import sys
from pathlib import Path


def test_the_example_trains_a_head_and_its_loss_falls():
    script = Path(__file__).parents[2] / "examples" / "train_eagle3_cpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
