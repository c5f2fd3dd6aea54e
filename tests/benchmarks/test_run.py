"""run.py: limits, failures and what is left out; and that what it would run is there."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run():
    spec = importlib.util.spec_from_file_location("benchmarks_run", ROOT / "benchmarks" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_failure_and_one_that_hangs_do_not_end_the_others_and_what_does_not_fit_is_left_out(run, tmp_path, capsys):
    (tmp_path / "good.py").write_text("print('a figure')")
    (tmp_path / "bad.py").write_text("print('before'); raise SystemExit(3)")
    (tmp_path / "hangs.py").write_text("print('waits', flush=True); __import__('time').sleep(600)")
    run.GROUPS = {
        "first": [("bad", f"{tmp_path}/bad.py", 20), ("hangs", f"{tmp_path}/hangs.py", 1)],
        "second": [("good", f"{tmp_path}/good.py", 20), ("long", f"{tmp_path}/good.py", 500)],
        "other": [("never", f"{tmp_path}/good.py", 1)],
    }
    run.main(["first", "second", "--seconds", "100", "--out", str(tmp_path / "logs")])
    printed = capsys.readouterr().out
    done = json.loads(printed.splitlines()[-1])
    assert [done[name]["status"] for name in ("bad", "hangs", "good")] == [3, None, 0]
    assert "left out" in done["long"]
    assert "never" not in done
    assert "a figure" in printed
    assert "waits" in (tmp_path / "logs" / "hangs.txt").read_text()


def test_a_group_that_is_not_there_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run.main(["nothing"])
    assert "nothing" in capsys.readouterr().err


def test_every_question_names_files_and_options_that_are_there(run, capsys):
    run.main(["--list"])
    listed = capsys.readouterr().out
    for questions in run.GROUPS.values():
        for name, command, _ in questions:
            assert name in listed
            files = re.findall(r"\S+\.py|tests/\S+", command)
            assert all((ROOT / file).exists() for file in files), command
            if not command.startswith("-m"):
                source = (ROOT / files[0]).read_text()
                assert all(f'"{option}"' in source for option in re.findall(r"--[a-z-]+", command)), command
