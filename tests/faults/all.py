"""All faults by one command: kills, power losses, disks, memory, company, mutations, quarantine, hostile files, many files.

Run as: python tests/faults/all.py [--long] [--vllm-python PYTHON] [--only kills,fuzz,...]

Prints the table of docs/trust.md as it goes. Short, it takes some minutes; with --long 1,000 kills, 200 of the vLLM engine, eight
starts of its server, 60 random states a moment of a power loss, a million names and ten minutes of fuzzing: more than an hour. What
can't be run here (no vLLM, no atheris) is said, not left out. Exit code 1: something delivered wrong rows, hung, was left behind or
failed.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUITES = ("disks", "sharing", "surroundings", "quarantine", "mutations", "fuzz_inputs")


@dataclass(frozen=True)
class Row:
    """One line of the table; None where a number doesn't apply."""

    fault: str
    tried: int | None = None
    survived: int | None = None
    wrong: int | None = 0
    hung: int | None = 0
    note: str = ""
    good: bool = True


class Runner:
    """Runs the harnesses as processes.

    Args:
        long: in full.
        vllm_python: an interpreter that has vLLM, or None.
    """

    def __init__(self, long: bool, vllm_python: str | None) -> None:
        self.long = long
        self._vllm_python = vllm_python

    def run(self, *words: str, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
        """A harness in a process of its own, from the root of the repository."""
        given = {**os.environ, **environment}
        return subprocess.run([python, *words], cwd=ROOT, env=given, capture_output=True, text=True, check=False)

    def kills(self) -> list[Row]:
        done = self.run("tests/faults/kills.py", "--rounds", "1000" if self.long else "60")
        return _kill_rows(done, "kills")

    def vllm(self) -> list[Row]:
        return self._vllm_kills("vllm", 200 if self.long else 12)

    def server(self) -> list[Row]:
        return self._vllm_kills("vllm-server", 8 if self.long else 1)

    def _vllm_kills(self, kind: str, rounds: int) -> list[Row]:
        python = self._vllm_python or (sys.executable if importlib.util.find_spec("vllm") else None)
        if python is None:
            return [Row(f"kills, {kind}", note="not run: vLLM isn't installed here (--vllm-python)")]
        words = ("tests/faults/kills.py", "--only", kind, "--rounds", str(rounds))
        return _kill_rows(self.run(*words, python=python), "kills")

    def power(self) -> list[Row]:
        done = self.run(
            *("-m", "pytest", "-q", "-s", "tests/faults/test_power_loss.py"),
            LAYERTAP_CRASHES="60" if self.long else "2",
        )
        return [_suite_row("power losses (states of a folder)", done, _states(done.stdout))]

    def suites(self) -> Iterator[Row]:
        for name in SUITES:
            done = self.run("-m", "pytest", "-q", f"tests/faults/test_{name}.py")
            yield _suite_row(name.replace("_", " "), done)

    def files(self) -> list[Row]:
        count, names = (100_000, 1_000_000) if self.long else (2_000, 20_000)
        done = self.run("tests/faults/many_files.py", "--files", str(count), "--names", str(names))
        good = done.returncode == 0
        return [Row("names in one folder", names, names if good else 0, good=good, note=f"{count:,} files written")]

    def fuzz(self) -> list[Row]:
        if importlib.util.find_spec("atheris") is None:
            return [Row("hostile files (atheris)", note="not run: atheris isn't installed here (pip install atheris)")]
        with tempfile.TemporaryDirectory() as corpus:
            seconds = 600 if self.long else 30
            done = self.run("tests/faults/fuzz_reader.py", corpus, f"-max_total_time={seconds}")
        found = re.search(r"Done (\d+) (?:runs )?in", done.stdout + done.stderr)
        tried = None if found is None else int(found[1])
        good = done.returncode == 0
        return [Row("hostile files (atheris)", tried, tried if good else None, good=good, note=f"{seconds} s")]


PARTS: dict[str, Callable[[Runner], Iterable[Row]]] = {
    "kills": Runner.kills,
    "vllm": Runner.vllm,
    "server": Runner.server,
    "power": Runner.power,
    "suites": Runner.suites,
    "files": Runner.files,
    "fuzz": Runner.fuzz,
}


def _states(said: str) -> int | None:
    """How many states of a folder were tried; None where no test got as far as to say it."""
    return sum(int(number) for number in re.findall(r"\d+ moments, (\d+) states:", said)) or None


def _kill_rows(done: subprocess.CompletedProcess[str], name: str) -> list[Row]:
    rows = []
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        if found["victim"].split()[-1] == "all":
            continue
        looked, whole, told = (format(found[key], ",") for key in ("admitted", "complete", "told"))
        note = f"{looked} paths looked at: {whole} complete, {told} told why not; {found['left_behind']} left behind"
        faults = found["wrong"] + found["hung"] + found["left_behind"]
        survived = max(0, found["rounds"] - faults)
        what = found["victim"] if found["victim"].endswith("disk") else f"{name}: {found['victim']}"
        rows.append(Row(what, found["rounds"], survived, found["wrong"], found["hung"], note, not faults))
    if done.returncode or not rows:
        rows.append(Row(name, good=False, note=done.stderr.strip()[-200:].replace("\n", " ")))
    return rows


def _suite_row(name: str, done: subprocess.CompletedProcess[str], tried: int | None = None) -> Row:
    """A suite fails on wrong rows and on hangs, so what passed had none."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    good = done.returncode == 0 and passed > 0
    note = f"{passed} tests passed, {failed} failed, {counts.get('skipped', 0)} skipped"
    none = 0 if good else None
    tried = passed + failed if tried is None else tried
    return Row(name, tried, tried - failed, none, none, note, good)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: known are {', '.join(PARTS)}")
    runner, rows = Runner(arguments.long, arguments.vllm_python), list[Row]()
    print("| fault | tried | survived | wrong rows | hangs | | `--only` |\n|---|---|---|---|---|---|---|")
    for name in chosen:
        began = time.monotonic()
        for row in PARTS[name](runner):
            _show(row, name)
            rows.append(row)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    _show(_sum(rows), ",".join(chosen))
    print(f"\n{_machine()}")
    return 0 if all(row.good for row in rows) else 1


def _show(row: Row, part: str) -> None:
    cells = [f"{value:,}" if value is not None else "" for value in (row.tried, row.survived, row.wrong, row.hung)]
    print(f"| {row.fault} | {' | '.join(cells)} | {row.note} | {part} |", flush=True)


def _sum(rows: list[Row]) -> Row:
    """Over all lines; what isn't known of a line that failed is not 0."""

    def total(name: str) -> int | None:
        values = [getattr(row, name) for row in rows if row.tried is not None]
        return None if None in values else sum(values)

    failed = sum(not row.good for row in rows)
    note = f"{failed} of {len(rows)} lines failed" if failed else ""
    return Row("all", total("tried"), total("survived"), total("wrong"), total("hung"), note, not failed)


def _machine() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores ({found[1] if found else platform.machine()}), {memory:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    sys.exit(main())
