"""How fast do the vLLM engine's writer processes take rows from the ring and publish their files?

No engine and no GPU: this process stands for both. It fills the shared ring with random bfloat16 rows of Qwen3-8B's width and hands
steps, orders and endings to real writer processes, as the tap does; files go to a tmpfs and are removed as they come. Readers don't
run beside it, so this is the writers' own limit.

- `end`: 256 requests that generate, 31 rows each, all end in one step. Timed from that step until the last file is there; 15 rows
  of each are still in the writer's memory then (4 layers, 32 KiB a row).
- `tiny`: the same with 4 layers of 64 values, where only the work per file counts; and `admit`: until all locks are held.
- `prefill`: prompts of 512 tokens, 4 layers.
- `all`: the same with all 36 layers (147 MiB a prompt).

CPU seconds are the writers' own (user and system, of all their threads), so they mean the same on a machine that does other things;
`engine_cpu` is what the threads that send and receive take in the engine's process.

    python benchmarks/vllm_writer.py
    python benchmarks/vllm_writer.py --only tiny,end,all --processes 1,2,4 --gigabytes 20
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import layertap
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.shared import SharedCells
from layertap.engines.vllm.tap import Step
from layertap.engines.vllm.unpack import GatherRoom
from layertap.engines.vllm.writer import WriterSetup
from layertap.engines.vllm.writers import start_writers

GENERATED, REQUESTS, PROMPT = 31, 256, 512
PATIENCE_SECONDS = 120


class Engine:
    """The engine's side of the writers: `num_slots` steps of `rows` rows, whose bytes stay the same.

    The token of a row is a function of its place in the ring, so that the writers' check for rows of other requests says nothing.
    """

    def __init__(self, folder, *, num_layers, hidden, rows, num_slots, num_processes):
        self.folder, self.rows, self.layers = folder, rows, tuple(range(1, num_layers + 1))
        self.hidden = hidden
        cells = rows * num_layers
        self.ring = SharedCells(cells * num_slots, 2 * hidden)
        self.slots = [slice(i * cells, (i + 1) * cells) for i in range(num_slots)]
        _fill(self.ring.array)
        self.free = list(range(num_slots))
        self.changed = threading.Condition()
        self.number = 0
        options = StoreOptions(shared_storage_path=str(folder), min_free_bytes=0)
        self.collector = start_writers(
            WriterSetup(
                options=options,
                model="Qwen/Qwen3-8B",
                num_layers=36,
                facts={
                    "engine": "vllm",
                    "engine_version": "0",
                    "compute_dtype": "bfloat16",
                    "residual": "single stream",
                },
                taps=self.layers,
                dtype="bfloat16",
                num_cells=cells * num_slots,
                cell_bytes=2 * hidden,
                gather=GatherRoom(num_requests=2 * REQUESTS, limit_bytes=options.byte_budget() // 4),
            ),
            self.ring,
            num_processes,
        )
        self.writers = self.collector.all if num_processes > 1 else [self.collector]
        while any(writer.pid is None for writer in self.writers):
            time.sleep(0.01)

    def order(self, name, prompt_len, max_tokens=0):
        """Begin a request; its rows are those of generated tokens where it generates, else those of the prompt."""
        path = self.folder / f"{name}.safetensors"
        spec = CaptureSpec(
            layers=self.layers,
            dtype="bfloat16",
            hidden_size=self.hidden,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            window=Window(include_output=bool(max_tokens)),
        )
        self.collector.order(
            Order(request_id=name, spec=spec, path=str(path), overwrite=False, public_id=name, tag=None)
        )
        return path

    def step(self, chunks, positions, slot):
        """Hand over the rows of a slot of the ring."""
        cells = self.slots[slot]
        self.number += 1
        self.ring.stamps[cells] = self.number
        facts = np.stack([positions, self.tokens(slot)[: len(positions)]])
        self.collector.step(
            Step(
                self.number,
                chunks,
                self.ring.array[cells],
                lambda: self._release(slot),
                torch.from_numpy(facts),
                cells.start,
                self.ring.stamps[cells],
                self.number,
            )
        )

    def take(self):
        """A slot that nobody reads any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.free, PATIENCE_SECONDS)
            return self.free.pop(0)

    def tokens(self, slot):
        """Of the rows of a slot."""
        return np.arange(slot * self.rows, (slot + 1) * self.rows)

    def finish(self, name, token_ids):
        """End a request."""
        self.collector.finish(Finish(request_id=name, token_ids=tuple(token_ids), finish_reason="length"))

    def wait_until_released(self):
        """Until the writers have let go of all rows."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.free) == len(self.slots), PATIENCE_SECONDS)

    def cpu_seconds(self):
        """What all threads of the writers have used."""
        total = 0
        for writer in self.writers:
            for task in Path(f"/proc/{writer.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def _release(self, slot):
        with self.changed:
            self.free.append(slot)
            self.changed.notify_all()


def _fill(cells):
    """Random bfloat16 values, a row of a layer at a time."""
    rng = np.random.default_rng(0)
    for first in range(0, len(cells), 4096):
        part = cells[first : first + 4096]
        values = rng.standard_normal((len(part), part.shape[1] // 2), np.float32)
        part[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def wait_for(paths, *, remove=False):
    """Until all files are there; with `remove` they go as they come."""
    left, deadline = list(paths), time.perf_counter() + PATIENCE_SECONDS
    while left:
        there = [path for path in left if path.exists()]
        if there and remove:
            for path in there:
                path.unlink()
        left = [path for path in left if path not in set(there)]
        if time.perf_counter() > deadline:
            raise SystemExit(
                f"{len(left)} files never came, the first {left[0]}: {list(left[0].parent.glob('*.error'))[:1]}"
            )
        time.sleep(0.001)


def empty(folder):
    """Remove what a round left."""
    for path in folder.iterdir():
        path.unlink()


def end_of_generation(engine, number):
    """Seconds until all locks are held, and from the step in which all requests end until the last file is there; CPU likewise."""
    names = [f"cmpl-{number:04d}-{i:04d}-0123456789abcdef" for i in range(REQUESTS)]
    cpu = [engine.cpu_seconds()]
    began = time.perf_counter()
    paths = [engine.order(name, 1, GENERATED) for name in names]
    engine.collector.wait_for_admissions(PATIENCE_SECONDS)
    admitted = time.perf_counter() - began
    cpu.append(engine.cpu_seconds())
    tokens, of_engine = [], time.process_time() - time.thread_time()
    for position in range(GENERATED):
        slot = engine.take()
        tokens.append(engine.tokens(slot))
        chunks = [Chunk(name, i, i + 1, i * len(engine.layers), len(engine.layers), 0) for i, name in enumerate(names)]
        engine.step(chunks, np.full(REQUESTS, position), slot)
    engine.wait_until_released()
    of_engine = time.process_time() - time.thread_time() - of_engine
    time.sleep(0.2)  # the full halves are written
    cpu.append(engine.cpu_seconds())
    began = time.perf_counter()
    last = 7
    for i, name in enumerate(names):
        engine.finish(name, [*(int(row[i]) for row in tokens), last])
    wait_for(paths)
    published = time.perf_counter() - began
    time.sleep(0.1)
    cpu.append(engine.cpu_seconds())
    empty(engine.folder)
    return {
        "admit_seconds": admitted,
        "admit_cpu_ms_per_file": 1e3 * (cpu[1] - cpu[0]) / REQUESTS,
        "engine_cpu_ms_per_step": 1e3 * of_engine / GENERATED,
        "end_seconds": published,
        "end_cpu_ms_per_file": 1e3 * (cpu[3] - cpu[2]) / REQUESTS,
    }


def prefill(engine, number, num_bytes):
    """GB a second and per CPU second, of prompts that are one step each."""
    per_prompt = PROMPT * len(engine.layers) * 2 * engine.hidden
    names = [f"cmpl-{number:04d}-{i:06d}-0123456789abcdef" for i in range(max(1, num_bytes // per_prompt))]
    paths = [engine.folder / f"{name}.safetensors" for name in names]
    remover = threading.Thread(target=wait_for, args=(paths,), kwargs={"remove": True})
    cpu, began = engine.cpu_seconds(), time.perf_counter()
    remover.start()
    for name in names:
        engine.order(name, PROMPT)
        slot = engine.take()
        engine.collector.wait_for_admissions(PATIENCE_SECONDS)
        engine.step([Chunk(name, 0, PROMPT, 0, len(engine.layers), 0)], np.arange(PROMPT), slot)
        engine.finish(name, engine.tokens(slot).tolist())
    remover.join()
    seconds, cpu = time.perf_counter() - began, engine.cpu_seconds() - cpu
    empty(engine.folder)
    total = per_prompt * len(names) / 1e9
    return {"gb_per_second": total / seconds, "gb_per_cpu_second": total / cpu}


def measure(question, folder, arguments, num_processes):
    """The medians of the rounds of one question; the first round is warm-up."""
    small = question in ("end", "tiny")
    engine = Engine(
        folder,
        num_layers=36 if question == "all" else 4,
        hidden=64 if question == "tiny" else 4096,
        rows=REQUESTS if small else PROMPT,
        num_slots=32 if small or question == "prefill" else 4,
        num_processes=num_processes,
    )
    try:
        rounds = []
        for number in range(arguments.rounds + 1):
            if small:
                rounds.append(end_of_generation(engine, number))
            else:
                rounds.append(prefill(engine, number, int(arguments.gigabytes * 1e9)))
    finally:
        engine.collector.close()
    figures = {key: round(statistics.median(one[key] for one in rounds[1:]), 4) for key in rounds[0]}
    spread = {key: [round(one[key], 4) for one in rounds[1:]] for key in rounds[0]}
    print(
        f"{question:8}{num_processes}  ",
        "  ".join(f"{key} {value} {spread[key]}" for key, value in figures.items()),
        flush=True,
    )
    return figures


def main():
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="end,tiny,prefill,all")
    parser.add_argument("--processes", default="1", help="numbers of writer processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a round of prefill and all")
    parser.add_argument("--storage", default="/dev/shm", help="where the files go")
    arguments = parser.parse_args()
    results = {}
    for question, processes in itertools.product(arguments.only.split(","), arguments.processes.split(",")):
        folder = Path(tempfile.mkdtemp(dir=arguments.storage, prefix="layertap-bench-"))
        try:
            results[f"{question} {processes}"] = measure(question, folder, arguments, int(processes))
        finally:
            shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "question": "writer",
                "results": results,
                "cores": len(os.sched_getaffinity(0)),
                "versions": {"layertap": layertap.__version__, "torch": torch.__version__, "numpy": np.__version__},
                "hardware": platform.processor() or platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
