"""README opens with two commands that set up everything by themselves, and CI runs the second of them."""

import os
import subprocess
import sys
from pathlib import Path

import dev

ROOT = Path(__file__).parents[1]


def test_readme_opens_with_commands_that_exist_and_ci_runs_its_tests():
    first = (ROOT / "README.md").read_text().split("```sh\n")[1].split("```")[0]
    commands = [line.split("#")[0].split() for line in first.splitlines()]
    assert commands == [["python3", "dev.py", "demo"], ["python3", "dev.py", "test"]]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1].split() == commands[1]
    assert all(callable(getattr(dev, command[2])) for command in commands)


def test_an_unknown_command_says_which_there_are():
    ended = subprocess.run([sys.executable, ROOT / "dev.py", "tset"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "dev.py demo" in ended.stderr
    assert "dev.py test" in ended.stderr


def test_the_status_of_a_step_that_fails_is_that_of_the_command(tmp_path):
    script = (ROOT / "dev.py").read_text()
    broken = tmp_path / "dev.py"
    broken.write_text(script.replace('run(sys.executable, "-m", "venv", VENV)', 'run("sh", "-c", "exit 7")'))
    (tmp_path / "pyproject.toml").write_text("")
    ended = subprocess.run([sys.executable, broken, "demo"], capture_output=True, check=False)
    assert ended.returncode == 7
    assert not (tmp_path / ".venv" / ".ready-demo").exists()


def test_what_is_installed_is_installed_again_only_after_a_change(tmp_path):
    stamp, source = tmp_path / "stamp", tmp_path / "source"
    source.touch()
    assert not dev.is_newer(stamp, source)
    stamp.touch()
    assert dev.is_newer(stamp, source)
    os.utime(source, (later := stamp.stat().st_mtime + 1, later))
    assert not dev.is_newer(stamp, source)
