"""The sweep runs, its figures and those of the other benchmarks are drawn, and the same figures give the same file."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[2] / "benchmarks"
ABOUT = {"gpu": "H200", "torch": "2.11"}
CASE = {"gemms_tok_s": 48_000, "files_tok_s": [42_000, 41_000, 43_000]}
CAPPED = {"cap_GiB": 24.0, "blocks": 64, "resident": 12, "tok_s": [9000, 9100], "gemms_tok_s": 10_900}


def plots(tmp_path, *texts):
    paths = [tmp_path / f"out{number}" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    command = [sys.executable, str(FOLDER / "plots.py"), *map(str, paths), "--into", str(tmp_path / "img")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def words(path):
    return " ".join(element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith("text"))


def test_the_sweep_runs_and_each_of_its_parts_becomes_a_picture(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "sweep.py"),
        "--tiny",
        "--only",
        "depth,size",
        "--sizes",
        "0.6B",
        "--tokens",
        "256",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout.splitlines()[-1])["points"]
    assert {point["sweep"] for point in points} == {"depth", "size"}
    assert all(point["tok_s"] > 0 and point["gemms_tok_s"] > 0 for point in points)
    assert plots(tmp_path, done.stdout).returncode == 0
    assert sorted(path.name for path in (tmp_path / "img").iterdir()) == ["extraction-depth.svg", "extraction-size.svg"]
    shown = words(tmp_path / "img" / "extraction-depth.svg")
    assert "deepest layer" in shown
    assert "Qwen3-8B" in shown


def test_workloads_and_capped_runs_are_drawn_with_their_share_of_the_ceiling(tmp_path):
    outputs = [
        f"mixed {json.dumps(CASE)}\n" + json.dumps(ABOUT | {"mixed": CASE}),
        json.dumps(ABOUT | {"cases": [CAPPED]}),
    ]
    assert plots(tmp_path, *outputs).returncode == 0
    assert "0.88" in words(tmp_path / "img" / "extraction-workloads.svg")
    shown = words(tmp_path / "img" / "extraction-offload.svg")
    assert "0.83" in shown
    assert "24 GiB" in shown
    first = (tmp_path / "img" / "extraction-offload.svg").read_bytes()
    plots(tmp_path, *outputs)
    assert (tmp_path / "img" / "extraction-offload.svg").read_bytes() == first


def test_an_output_without_figures_is_refused(tmp_path):
    done = plots(tmp_path, "nothing\n{broken")
    assert done.returncode == 1
    assert "no line with JSON" in done.stderr
