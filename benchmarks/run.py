"""Several questions one after the other, in the time that a GPU is there for.

Run as: python benchmarks/run.py GROUP [GROUP ...] [--seconds 1500] [--out logs]
        python benchmarks/run.py --list

Each question is a command of its own (see `--list`) with a limit of its own, and is left out where less time than it takes is
left. Their output goes to one file each; what they print last goes to the screen. A failure doesn't end the others. To use two
cards, start two of these with different CUDA_VISIBLE_DEVICES, but time nothing beside anything else that writes or computes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = "-m pytest -q -p no:schemathesis -p no:cacheprovider"
GROUPS: dict[str, list[tuple[str, str, int]]] = {
    # name, what Python is to run, and the seconds that it takes on an H200 (as far as it was run there)
    "right": [
        ("kernels", f"{TESTS} tests/engines/test_digests.py tests/engines/test_fp8.py tests/engines/test_pinned.py "
         "tests/engines/vllm/test_side.py tests/engines/vllm/test_kernels.py", 60),
        ("embedded", f"{TESTS} tests/engines/transformers/test_trees.py tests/engines/transformers/test_paged.py "
         "tests/engines/transformers/test_trial.py", 90),
        ("vllm-long", "benchmarks/vllm_gpu_check.py --only v2-long,v1-long", 150),
        ("vllm-mixed", "benchmarks/vllm_gpu_check.py --only v2-graphs,v1-ngram,v1-eager", 210),
        ("vllm-8b", "benchmarks/vllm_gpu_check.py --only v2-8b", 240),
    ],
    "right-x2": [("vllm-parallel", "benchmarks/vllm_gpu_check.py --only tp2,pp2", 200)],
    "right-more": [("vllm-tests", f"{TESTS} -m vllm tests/engines/vllm", 550)],
    "extract": [
        ("extract", "benchmarks/extract_gpu.py --only all,mixed,early,long --repeats 2", 330),
        ("generate", "benchmarks/generate_gpu.py --rounds 2", 180),
    ],
    "capture": [
        ("capture-all", "benchmarks/vllm_overhead.py --mode tap --work all --rounds 2", 200),
        ("capture-all-wide", "benchmarks/vllm_overhead.py --mode tap --work all --rounds 2 --in-flight 20", 200),
        ("capture", "benchmarks/vllm_overhead.py --mode tap --work mixed,generate --rounds 2", 220),
    ],
    "peers": [
        ("plain", "benchmarks/vllm_overhead.py --mode plain --work mixed,generate,long --rounds 2", 230),
        ("own", "benchmarks/vllm_overhead.py --mode own --work mixed,generate --rounds 1", 230),
    ],
    "yardstick": [
        (f"yardstick-{mode}", f"benchmarks/vllm_yardstick.py --mode {mode} --rounds 2", 200)
        for mode in ("ours", "plain", "own")
    ],
    "writers": [
        ("writer", "benchmarks/vllm_writer.py --only tiny,end,all --processes 1,2,4 --gigabytes 20", 150),
        *((f"capture-{count}", f"benchmarks/vllm_overhead.py --mode tap --work generate --rounds 2 --writers {count}", 170)
          for count in (1, 4)),
    ],
    "parallel": [
        ("data-parallel", "benchmarks/data_parallel.py --rounds 2", 200),
        ("tensor-parallel", "benchmarks/vllm_overhead.py --mode tap --tp 2 --work half --rounds 3", 200),
    ],
    "sweeps": [
        ("sweep", "benchmarks/sweep.py", 550),
        ("prefixes", "benchmarks/prefixes.py --device cuda", 200),
    ],
}  # fmt: skip
_MOST = 1.6
"""Times what a question usually takes: then it hangs."""


def ended(name: str, command: str, limit: float, out: Path) -> tuple[int | None, float]:
    """Run a question; its exit status (None: it took too long), and how long it took."""
    began = time.monotonic()
    with (out / f"{name}.txt").open("w") as sink:
        print(f"python {command}", file=sink, flush=True)
        process = subprocess.Popen(
            [sys.executable, *command.split()], cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, 9)
            process.wait()
    return status, time.monotonic() - began


def last_lines(path: Path, count: int = 12) -> Iterator[str]:
    """The end of what a question printed."""
    for line in path.read_text(errors="replace").splitlines()[-count:]:
        yield line[-1500:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=", ".join(GROUPS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them together")
    parser.add_argument("--out", type=Path, default=Path("benchmark-logs"))
    args = parser.parse_args(argv)
    unknown = set(args.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    questions = [question for group in args.groups or GROUPS for question in GROUPS[group]]
    if args.list or not args.groups:
        for name, command, seconds in questions:
            print(f"{name:18} {seconds:4} s  python {command}")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    done: dict[str, object] = {}
    for name, command, seconds in questions:
        left = deadline - time.monotonic()
        if left < seconds:
            done[name] = f"left out: it takes {seconds} s, {left:.0f} s are left"
            continue
        status, took = ended(name, command, min(left, _MOST * seconds), args.out)
        done[name] = {"status": status, "seconds": round(took, 1)}
        print(f"== {name}: {'too long' if status is None else status} after {took:.0f} s", flush=True)
        for line in last_lines(args.out / f"{name}.txt"):
            print(line, flush=True)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
