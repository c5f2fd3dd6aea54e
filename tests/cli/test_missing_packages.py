"""Commands in an environment that lacks a package: one line that names it, no traceback, and nothing begun."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from layertap import LLM, OptionError
from layertap.cli.app import make_app

WANTS_VLLM = {
    "extract": ["extract", "MODEL", "in.txt", "--layers", "1", "--out", "states", "--engine", "vllm"],
    "serve": ["serve", "MODEL", "--engine", "vllm"],
    "doctor": ["doctor", "MODEL", "--engine", "vllm"],
}


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # how Python marks what can't be imported


@pytest.mark.parametrize("command", WANTS_VLLM)
def test_a_command_that_wants_vllm_says_how_to_install_it(command, no_vllm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a prompt\n")
    done = CliRunner().invoke(make_app(), WANTS_VLLM[command])
    assert done.exit_code == 2, done.output
    assert "vLLM isn't installed" in done.output
    assert "pip install 'layertap[vllm]'" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_the_vllm_engine_in_python_says_how_to_install_it(no_vllm):
    with pytest.raises(OptionError, match=r"pip install 'layertap\[vllm\]'"):
        LLM("MODEL", engine="vllm")


def without(package, *words, cwd):
    code = f"import sys; sys.modules[{package!r}] = None; from layertap.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", ("extract", "MODEL", "in.txt", "--layers", "1", "--out", "states")),
        ("uvicorn", ("serve-files", ".")),
        ("typer", ("--help",)),
    ],
)
def test_a_missing_package_is_one_line_that_names_it(package, words, tmp_path):
    (tmp_path / "in.txt").write_text("a prompt\n")
    done = without(package, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: {package} isn't installed" in done.stderr
    assert f"pip install {package}" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_the_help_needs_no_torch(tmp_path):
    done = without("torch", "extract", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--layers" in done.stdout
