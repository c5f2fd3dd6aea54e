"""100,000 short conversations through a tiny model on the CPU: is memory flat, is nothing lost, does a killed run end the same?

- `requests`: `llm.extract` on 10, 1,000, 10,000 and 100,000 prompts; time per prompt and memory. Both must stay flat.
- `whole`: `layertap extract` over the input, uninterrupted; memory of the process while the data set grows.
- `killed`: the same command on the same input, killed with SIGKILL at random moments and started again until it comes to its
  end. Then both data sets are read with their checksums verified, and compared: every line of the index (but for where
  in which shard) and every row, bit for bit.

The input has chats of one to three turns with loss masks, plain prompts, and now and then a record that can't be read. The
last line of stdout is JSON.

    python benchmarks/long_run.py                                # everything; about half an hour on two cores
    python benchmarks/long_run.py --samples 2000 --kills 3 --only killed
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

_TEXT = "the of and rows layer model token state block draft train serve write read shard index sample long prompt"
WORDS = _TEXT.split()
BROKEN_EVERY = 997


def tiny_model(folder: Path) -> Path:
    """Two random blocks of 32 values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from layertap.testing.tokenizer import byte_tokenizer

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=320,
        bos_token_id=1,
        eos_token_id=7,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_input(path: Path, count: int) -> None:
    """Records that depend on their number alone."""
    with path.open("w") as file:
        for number in range(count):
            rng = random.Random(number)
            text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 8)))
            if number % BROKEN_EVERY == BROKEN_EVERY - 1:
                file.write('{"messages": [\n')
            elif number % 3:
                turns = [
                    {"role": role, "content": f"{number} {turn} {text}"}
                    for turn in range(1 + number % 2)
                    for role in ("user", "assistant")
                ]
                file.write(json.dumps({"id": f"c{number}", "messages": turns}) + "\n")
            else:
                file.write(json.dumps({"id": f"p{number}", "prompt": f"{number}: {text}"}) + "\n")


def memory(pid: int | str = "self") -> tuple[float, float]:
    """Resident MiB of a process: all of it, and what is not backed by files."""
    values = {}
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                values[name] = int(rest.split()[0]) / 1024
    return values["VmRSS"], values["RssAnon"]


def measure_requests(model: Path, counts: list[int]) -> list[dict[str, float]]:
    """Time `llm.extract` for growing numbers of prompts."""
    from layertap import LLM

    def prompts(count: int) -> Iterator[dict[str, list[int]]]:
        rng = random.Random(0)
        for _ in range(count):
            yield {"prompt_token_ids": [rng.randrange(8, 320) for _ in range(rng.randrange(8, 40))]}

    found = []
    with LLM(str(model), dtype="float32", device="cpu") as llm:
        for _ in llm.extract(prompts(100), layers=[1, 2]):
            pass
        for count in counts:
            started = time.perf_counter()
            done = rows = 0
            for result in llm.extract(prompts(count), layers=[1, 2]):
                done += 1
                rows += len(result.token_ids)
            seconds = time.perf_counter() - started
            assert done == count
            line = {
                "prompts": count,
                "us_per_prompt": round(seconds / count * 1e6),
                "us_per_row": round(seconds / rows * 1e6, 1),
                "anon_mib": round(memory()[1]),
            }
            print(line, flush=True)
            found.append(line)
    return found


def start(model: Path, source: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start `layertap extract`."""
    words = [
        "extract",
        str(model),
        str(source),
        "--layers",
        "1,2",
        "--out",
        str(out),
        "--shard-seconds",
        "2",
        "--quiet",
    ]
    log = (out.parent / f"{out.name}.log").open("ab")
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from layertap.cli import main; main()",
            *words,
            "--dtype",
            "float32",
            "--device",
            "cpu",
        ],
        stdout=log,
        stderr=log,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
    )


class Published:
    """Counts the samples that are published, reading each index part once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, int] = {}

    def __call__(self) -> int:
        import pyarrow.parquet as pq

        for path in self._folder.glob("shards/w*.index.parquet"):
            if path not in self._known:
                self._known[path] = pq.read_metadata(path).num_rows
        return sum(self._known.values())


def exit_code(count: int) -> int:
    """Of a run: 3 where there are records that can't be read."""
    return 3 if count >= BROKEN_EVERY else 0


def run_whole(model: Path, source: Path, out: Path, count: int) -> dict[str, object]:
    """Run once, watching the memory of the process."""
    process, published = start(model, source, out), Published(out)
    started = time.perf_counter()
    points: list[tuple[float, int, float, float]] = []
    while process.poll() is None:
        with contextlib.suppress(OSError, KeyError):
            points.append((time.perf_counter() - started, published(), *memory(process.pid)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    seconds = time.perf_counter() - started
    assert process.returncode == exit_code(count), f"exit code {process.returncode}; see {out}.log"
    table = []
    for tenth in range(1, 11):
        at = [point for point in points if point[1] >= count * tenth / 10 - 1] or points[-1:]
        table.append(
            {"seconds": round(at[0][0]), "samples": at[0][1], "rss_mib": round(at[0][2]), "anon_mib": round(at[0][3])}
        )
        print(table[-1], flush=True)
    return {"seconds": round(seconds, 1), "peak_anon_mib": round(max(point[3] for point in points)), "memory": table}


def run_killed(model: Path, source: Path, out: Path, count: int, kills: int, seed: int) -> dict[str, object]:
    """Kill and continue; each kill comes a random time after a random number of samples was published."""
    rng = random.Random(seed)
    moments = sorted(rng.randrange(count * 9 // 10) for _ in range(kills))
    published = Published(out)
    died_at = []
    for moment in moments:
        process = start(model, source, out)
        while process.poll() is None and published() < moment:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.0, 1.0))
        if process.poll() is not None:
            sys.exit(f"the run ended with {process.returncode} before it was killed; see {out}.log")
        process.send_signal(signal.SIGKILL)
        process.wait()
        died_at.append(published())
        print(f"killed with {died_at[-1]:,} samples published", flush=True)
    process = start(model, source, out)
    assert process.wait() == exit_code(count), f"exit code {process.returncode}; see {out}.log"
    return {"kills": len(died_at), "died_at": died_at}


def compare(left: Path, right: Path, count: int) -> dict[str, object]:
    """Compare two data sets, sample by sample, with every checksum verified."""
    import numpy as np

    from layertap import open_dataset
    from layertap.datasets.index import load_entries, part_paths

    sets = [open_dataset(folder, verify=True) for folder in (left, right)]
    broken = count // BROKEN_EVERY
    for one in sets:
        assert len(one) == count - broken
        assert len(one.failures) == broken
        assert len(set(one.indices.tolist())) == len(one)
        assert not list(one.folder.glob("**/.*")), "something was left over"
        names = sum(
            sum(entry.file is not None for entry in load_entries(part, one.manifest.id))
            for part in part_paths(one.folder)
        )
        assert names == len(one), "a sample stands in the index twice"
    assert sets[0].failures == sets[1].failures
    for position in range(len(sets[0])):
        here, there = (replace(one.entry(position), file="", row=0) for one in sets)
        assert here == there, f"sample {here.index}: the index differs"
        for mine, other in zip(sets[0].raw(position), sets[1].raw(position), strict=True):
            assert np.array_equal(mine, other), f"sample {here.index}: the rows differ"
    return {"samples": len(sets[0]), "failed": broken, "tokens": sets[0].num_tokens, "identical": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="requests,whole,killed", help="parts, with commas between")
    parser.add_argument("--folder", type=Path, help="keep everything here; default a temporary folder, removed")
    options = parser.parse_args()
    parts = set(options.only.split(","))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="layertap-long-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {"samples": options.samples}
    try:
        model, source = tiny_model(folder / "model"), folder / "chats.jsonl"
        write_input(source, options.samples)
        whole, killed = folder / "whole", folder / "killed"
        if parts & {"whole", "killed"}:
            found["whole"] = run_whole(model, source, whole, options.samples)
        if "killed" in parts:
            found["killed"] = run_killed(model, source, killed, options.samples, options.kills, options.seed)
            found["compared"] = compare(whole, killed, options.samples)
        if "requests" in parts:
            counts = itertools.takewhile(lambda count: count <= options.samples, (10, 1000, 10_000, 100_000))
            found["requests"] = measure_requests(model, list(counts))
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
