"""Data sets beside one file a sample: write and shuffled-read GB/s, one run, one disk.

    python benchmarks/dataset.py [--samples 400] [--tokens 500] [--folder DIR]

Rows are the same random bytes for all: bfloat16 [tokens, 3, 1024] a sample. Writers: layertap's shards (with a digest a row, and a
sync a shard), `safetensors.save_file` a sample, `torch.save` a sample (both without sync: their usual use). Readers go through
all samples in one shuffled order and touch every byte (a sum over the rows as int64), from the page cache (`cached`) and, where
the kernel lets us drop the files from it (posix_fadvise), from the disk (`cold`). `raw` is one big file mapped by NumPy, read in
the same order: what the machine can do. `disk` reads the same big file past the page cache (O_DIRECT) in the same rounds, end to
end in pieces of 8 MiB and sample by sample in the shuffled order, by one thread and by 16: what no reader can pass. The last line
is JSON.

`few` reads a fiftieth of the samples, cold: what a sample costs in a set larger than memory, where nothing that was read around
others is still there. `large` are shards that layertap takes for such a set, read one by one or in batches of 16. Bytes from the
disk are those that the kernel counts.
"""

import argparse
import json
import mmap
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from layertap.datasets import reader
from layertap.datasets.loader import HiddenStatesStream
from layertap.datasets.manifest import Manifest, RowIdentity
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, Sample

LAYERS, HIDDEN = (2, 18, 33), 1024
IDENTITY = RowIdentity(
    model="random",
    revision=None,
    model_fingerprint=None,
    tokenizer_hash=None,
    chat_template_hash=None,
    layers=LAYERS,
    num_layers=36,
    hidden_size=HIDDEN,
    save_dtype="bfloat16",
    compute_dtype="bfloat16",
    quantization=None,
    residual="none",
    engine="none",
    engine_version="0",
)


def drop_from_cache(folder):
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touched(rows):
    """Read every byte."""
    return int(rows.reshape(-1).view(torch.int64).sum())


class Shards:
    def write(self, folder, samples):
        manifest = Manifest(rows=IDENTITY, layout="shards", input_name="random")
        with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, manifest).manifest) as writer:
            for index, (rows, ids) in enumerate(samples):
                raw = rows.view(torch.uint8).numpy().reshape(len(ids), -1)
                writer.add(
                    Sample(
                        index=index,
                        source_hash=f"{index:032x}",
                        rows=raw,
                        token_ids=ids.numpy(),
                        prompt_tokens=len(ids),
                        finish_reason="prefill",
                    )
                )

    def read(self, folder, order):
        ds = open_dataset(folder)
        return sum(touched(ds[position]["hidden_states"]) for position in order)


class Large(Shards):
    """The same, as if memory couldn't hold them; the disk is told of so many at once."""

    def __init__(self, told):
        self.told = told

    def read(self, folder, order):
        before, reader.memory_bytes = reader.memory_bytes, lambda: 1
        try:
            ds = open_dataset(folder)
            found = 0
            for first in range(0, len(order), self.told):
                part = order[first : first + self.told]
                ds.will_need(part)
                found += sum(touched(ds[position]["hidden_states"]) for position in part)
            return found
        finally:
            reader.memory_bytes = before


class Safetensors:
    def write(self, folder, samples):
        for index, (rows, ids) in enumerate(samples):
            save_file({"hidden_states": rows, "token_ids": ids}, folder / f"{index}.safetensors")

    def read(self, folder, order):
        return sum(touched(load_file(folder / f"{index}.safetensors")["hidden_states"]) for index in order)


class TorchSave:
    def write(self, folder, samples):
        for index, (rows, ids) in enumerate(samples):
            torch.save({"hidden_states": rows, "token_ids": ids}, folder / f"{index}.pt")

    def read(self, folder, order):
        return sum(touched(torch.load(folder / f"{index}.pt")["hidden_states"]) for index in order)


class Raw:
    def write(self, folder, samples):
        self.count = len(samples)
        with (folder / "raw.bin").open("wb") as file:
            for rows, _ in samples:
                file.write(rows.view(torch.uint8).numpy().data)

    def read(self, folder, order):
        mapped = np.memmap(folder / "raw.bin", np.uint8, mode="c").reshape(self.count, -1)
        return sum(touched(torch.from_numpy(mapped[index])) for index in order)


class Disk:
    """Direct reads of the big file; nothing is added up."""

    def __init__(self, folder, order):
        self.path = folder / "raw.bin"
        size = self.path.stat().st_size // len(order)
        self.ways = {
            "end to end": [(start, 8 << 20) for start in range(0, size * len(order), 8 << 20)],
            "sample by sample": [
                (at * size // 4096 * 4096, (at * size % 4096 + size + 4095) // 4096 * 4096) for at in order
            ],
        }

    def read(self, way, threads):
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            with ThreadPoolExecutor(threads) as pool:
                return sum(pool.map(lambda piece: self._piece(fd, *piece), self.ways[way]))
        finally:
            os.close(fd)

    def _piece(self, fd, start, size):
        with mmap.mmap(-1, size) as aligned:
            return os.preadv(fd, [aligned], start)


def read_from_disk():
    """Bytes that this process has made the disks read."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("read_bytes:") + 1])


def measure_few(kinds, base, order, repeats):
    """Milliseconds and bytes a sample."""
    chosen = order[: max(20, len(order) // 50)]
    best = {}
    for _ in range(repeats):
        for name, kind in kinds.items():
            folder = base / ("shards" if "large" in name else name)
            drop_from_cache(folder)
            before = read_from_disk()
            seconds, _ = timed(lambda kind=kind, folder=folder: kind.read(folder, chosen))
            one = {
                "ms_a_sample": seconds / len(chosen) * 1e3,
                "disk_mb_a_sample": (read_from_disk() - before) / len(chosen) / 1e6,
            }
            best[name] = min(best.get(name, one), one, key=lambda found: found["ms_a_sample"])
    return best


def timed(work):
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400)
    # not a power of two: rows of real samples don't begin at the pages that large mappings want
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; default the temporary folder"
    )
    options = parser.parse_args()
    pool = torch.randint(-(2**15), 2**15, (8, options.tokens, len(LAYERS), HIDDEN), dtype=torch.int16).view(
        torch.bfloat16
    )
    ids = torch.arange(options.tokens)
    parts = [one.clone() for one in pool]  # torch.save would write the whole pool with each view of it
    samples = [(parts[index % 8], ids) for index in range(options.samples)]
    total = options.samples * pool[0].numel() * 2
    order = list(range(options.samples))
    random.Random(0).shuffle(order)
    found = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        kinds = {"raw": Raw(), "shards": Shards(), "safetensors": Safetensors(), "torch.save": TorchSave()}
        sums = set()
        for name, kind in kinds.items():
            folder = Path(base) / name
            folder.mkdir()
            seconds, _ = timed(lambda kind=kind, folder=folder: kind.write(folder, samples))
            found[name] = {"write": total / seconds / 1e9}
        disk = Disk(Path(base) / "raw", order)
        ceilings = dict.fromkeys([(way, threads) for way in disk.ways for threads in (1, 16)], 0.0)
        for what in ("cold", "cached"):
            best = dict.fromkeys(kinds, float("inf"))
            for _ in range(options.repeats):  # in turn, so that a busy moment hits all
                for way, threads in ceilings if what == "cold" else ():
                    drop_from_cache(Path(base) / "raw")
                    seconds, size = timed(lambda way=way, threads=threads: disk.read(way, threads))
                    ceilings[way, threads] = max(ceilings[way, threads], size / seconds / 1e9)
                for name, kind in kinds.items():
                    if what == "cold":
                        drop_from_cache(Path(base) / name)
                    seconds, checked = timed(lambda kind=kind, name=name: kind.read(Path(base) / name, order))
                    best[name] = min(best[name], seconds)
                    sums.add(checked)
            for name, seconds in best.items():
                found[name][what] = total / seconds / 1e9
        few = measure_few(
            {**kinds, "large": Large(1), "large, told of 16": Large(16)}, Path(base), order, options.repeats
        )
        stream = HiddenStatesStream(Path(base) / "shards")
        seconds, checked = timed(lambda: sum(touched(item["hidden_states"]) for item in stream))
        sums.add(checked)
        found["shards"]["stream"] = total / seconds / 1e9
    if len(sums) != 1:
        sys.exit("the readers read different bytes")
    print(f"{total / 1e9:.2f} GB, {options.samples} samples; GB/s, best of {options.repeats}")
    print(f"{'':12} {'write':>8} {'cold':>8} {'cached':>8}")
    for name, row in found.items():
        print(f"{name:12} {row['write']:8.2f} {row['cold']:8.2f} {row['cached']:8.2f}")
    print(f"stream       {'':17} {found['shards']['stream']:8.2f}")
    for (way, threads), speed in ceilings.items():
        print(f"disk, {way}, {threads} at once: {speed:.2f}")
    for name, row in few.items():
        print(f"few, {name}: {row['ms_a_sample']:.2f} ms and {row['disk_mb_a_sample']:.2f} MB from the disk a sample")
    ceiling = {f"{way}, {threads} at once": speed for (way, threads), speed in ceilings.items()}
    print(json.dumps({"gb": total / 1e9, "gb_per_second": found, "disk_gb_per_second": ceiling, "few": few}))


if __name__ == "__main__":
    main()
