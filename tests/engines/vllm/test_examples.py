"""The Python of docs/vllm.md is run, in a process of its own, with a tiny model in the place of the real one."""

import re
import subprocess
import sys
from pathlib import Path

import checkpoints

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_examples_of_the_page_run_and_print_what_they_say(tmp_path, checkpoint_folder):
    saved = checkpoints.save("llama", checkpoint_folder / "deep", num_hidden_layers=8, layer_types=None)
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(saved)
    fences = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code = "\n".join(fences).replace(
        "max_model_len=256", 'max_model_len=256, dtype="float32", enforce_eager=True, block_size=32'
    )
    assert len(fences) == 1
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = done.stdout.splitlines()
    for expected in (r"0 \(8, 1\) \(\d+, 2, 64\)", r"1 \(8, 1\) \(\d+, 2, 64\)", "1 None"):
        assert any(re.fullmatch(expected, line) for line in said), (expected, said)
    assert sum(line.endswith(", 1, 64)") for line in said) == 2
    assert any(line in ("yes", "no") for line in said)
    assert any(line.isdigit() and int(line) >= 64 for line in said)
    assert len(list((tmp_path / "states").glob("*.safetensors"))) == 6
