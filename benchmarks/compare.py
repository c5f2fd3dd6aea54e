"""What became slower between two runs of a benchmark: reads the JSON line that each prints last.

Run as: python benchmarks/compare.py OLD NEW [--tolerance 0.05]

OLD and NEW hold the output of the same command. Rates (`tok_s`, `GB_s`, `ratio`, `of_...`) should not fall, times (`..._s`,
`..._ms`, `seconds`) should not rise; lists count as their median. Figures of different machines don't compare: it is said where
the runs name different ones. Exit 1 if something is worse than the tolerance allows.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

RATES = ("tok_s", "GB_s", "ratio", "rate", "of_gemms", "per_s")
TIMES = ("_s", "_ms", "seconds")
MACHINE = ("gpu", "hardware", "torch", "transformers", "vllm", "python", "versions", "threads")


def last_json(path: Path) -> dict:
    """The last line that is a JSON object."""
    for line in reversed(path.read_text().splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{path}: no line with JSON; give the output of a benchmark")


def figures(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number, by its path; a list of numbers as its median."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        yield name, float(statistics.median(value))


def direction(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where it means nothing."""
    parts = name.split(".")
    if any(rate in part for part in parts for rate in RATES):
        return 1
    return -1 if any(part.endswith(TIMES) for part in parts) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative; below the spread it says nothing")
    args = parser.parse_args()
    old, new = last_json(args.old), last_json(args.new)
    for key in MACHINE:
        if old.get(key) != new.get(key):
            print(f"note: {key} differs: {old.get(key)} and {new.get(key)}")
    before, after = dict(figures(old)), dict(figures(new))
    worse = []
    print(f"{'figure':50s} {'old':>12s} {'new':>12s} {'new/old':>8s}")
    for name in before:
        sign = direction(name)
        if not sign:
            continue
        if name not in after:
            worse.append(name)
            print(f"{name:50s} {before[name]:12.4g} {'missing':>12s}")
            continue
        ratio = after[name] / before[name] if before[name] else float("nan")
        bad = (1 - ratio if sign > 0 else ratio - 1) > args.tolerance
        if bad:
            worse.append(name)
        print(f"{name:50s} {before[name]:12.4g} {after[name]:12.4g} {ratio:8.3f}{'  worse' if bad else ''}")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
