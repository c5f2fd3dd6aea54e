"""The command that runs all faults: what it can't run it says, and what went wrong it doesn't hide."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from power_loss import said
from victims import Figures

spec = importlib.util.spec_from_file_location("faults_all", Path(__file__).with_name("all.py"))
faults = importlib.util.module_from_spec(spec)
sys.modules["faults_all"] = faults
spec.loader.exec_module(faults)


def ended(code, *lines, error=""):
    return subprocess.CompletedProcess([], code, "\n".join(lines), error)


def test_what_cannot_be_run_here_is_a_line_of_the_table(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["all.py", "--only", "vllm,server,fuzz"])
    assert faults.main() == 0
    said = capsys.readouterr().out
    assert "not run: vLLM isn't installed here" in said
    assert "not run: atheris isn't installed here" in said


def test_an_unknown_part_is_refused_with_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["all.py", "--only", "kill"])
    with pytest.raises(SystemExit):
        faults.main()
    assert "known are kills, vllm, server, power" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "good"), [({}, True), ({"wrong": 1}, False), ({"hung": 1}, False), ({"left_behind": 1}, False)]
)
def test_wrong_rows_hangs_and_leftovers_are_shown_and_fail(fault, good):
    figures = {"rounds": 3, "admitted": 7, "complete": 5, "told": 2, **fault}
    line, whole = (json.dumps({"victim": name, **asdict(Figures(**figures))}) for name in ("writer", "all"))
    (row,) = faults._kill_rows(ended(0, "noise", line, whole), "kills")
    assert (row.good, row.tried, row.survived) == (good, 3, 3 if good else 2)
    assert (row.wrong, row.hung) == (fault.get("wrong", 0), fault.get("hung", 0))
    assert "7 paths looked at: 5 complete, 2 told" in row.note


def test_the_last_line_is_the_sum_and_says_how_many_lines_failed():
    rows = [faults.Row("a", 3, 3), faults.Row("b", 4, 2, 1, 1, good=False), faults.Row("not run")]
    total = faults._sum(rows)
    assert (total.tried, total.survived, total.wrong, total.hung, total.good) == (7, 5, 1, 1, False)
    assert total.note == "1 of 3 lines failed"
    assert faults._sum([*rows, faults.Row("broke", 1, 0, None, None, good=False)]).wrong is None


def test_a_harness_that_breaks_fails_with_its_last_words():
    rows = faults._kill_rows(ended(1, error="Traceback\nboom"), "kills")
    assert [row.good for row in rows] == [False]
    assert "boom" in rows[0].note
    suite = faults._suite_row("disks", ended(1, "2 failed, 5 passed in 3 s"))
    assert (suite.good, suite.tried, suite.survived, suite.wrong) == (False, 7, 5, None)
    assert faults._suite_row("disks", ended(0, "7 passed, 1 skipped in 3 s")).good
    assert not faults._suite_row("disks", ended(0, "no tests ran")).good


def test_what_the_power_losses_say_is_counted():
    assert faults._states(f"{said(60, 3840)} Counter()\n.{said(7, 35)} Counter()\n") == 3875
    assert faults._states("2 failed") is None
