"""compare.py, on what the benchmarks really print; and that the small benchmark for the CPU runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULT = {"gpu": "H200", "mixed": {"files_tok_s": [100, 90, 110], "of_gemms": 0.9}, "up_s": 10.0, "layers": 4}


def compare(tmp_path, old, new, *options):
    for name, result in (("old", old), ("new", new)):
        (tmp_path / name).write_text(f"some table\n{json.dumps(result)}\n")
    command = [sys.executable, str(FOLDER / "compare.py"), str(tmp_path / "old"), str(tmp_path / "new"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mixed": {"files_tok_s": [80, 81, 200], "of_gemms": 0.9}}, "mixed.files_tok_s"),
        ({"mixed": {"files_tok_s": [100], "of_gemms": 0.8}}, "mixed.of_gemms"),
        ({"up_s": 11.0}, "up_s"),
        ({"mixed": {"files_tok_s": [100]}}, "mixed.of_gemms"),
    ],
)
def test_what_became_worse_is_named_and_fails(tmp_path, change, named):
    done = compare(tmp_path, RESULT, {**RESULT, **change})
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.endswith(("worse", "missing"))]
    assert line.startswith(named)


@pytest.mark.parametrize(
    "change", [{}, {"layers": 1}, {"up_s": 5.0}, {"mixed": {"files_tok_s": [97], "of_gemms": 1.2}}]
)
def test_what_is_better_or_within_the_tolerance_passes(tmp_path, change):
    assert compare(tmp_path, RESULT, {**RESULT, **change}).returncode == 0


def test_another_machine_is_said(tmp_path):
    assert "gpu differs" in compare(tmp_path, RESULT, {**RESULT, "gpu": "B200"}).stdout


def test_output_without_figures_is_refused(tmp_path):
    (tmp_path / "old").write_text("nothing\n")
    command = [sys.executable, str(FOLDER / "compare.py"), str(tmp_path / "old"), str(tmp_path / "old")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no line with JSON" in done.stderr


@pytest.mark.slow
def test_the_small_benchmark_for_the_cpu_runs_and_compares_with_itself(tmp_path):
    command = [sys.executable, str(FOLDER / "cpu.py"), "--tiny", "--prompts", "4", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["largest_row_error"] < 1e-4
    assert compare(tmp_path, result, result).returncode == 0
