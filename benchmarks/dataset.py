"""Data sets beside one file a sample: write and shuffled-read GB/s, one run, one disk.

    python benchmarks/dataset.py [--samples 400] [--tokens 500] [--folder DIR]

Rows are the same random bytes for all: bfloat16 [tokens, 3, 1024] a sample. Writers: layertap's shards (with a digest a row, and a
sync a shard), `safetensors.save_file` a sample, `torch.save` a sample (both without sync: their usual use). Readers go through
all samples in one shuffled order and touch every byte (a sum over the rows as int64), from the page cache (`cached`) and, where
the kernel lets us drop the files from it (posix_fadvise), from the disk (`cold`). `raw` is one big file mapped by NumPy, read in
the same order: what the machine can do. The last line is JSON.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

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
        with (folder / "raw.bin").open("wb") as file:
            for rows, _ in samples:
                file.write(rows.view(torch.uint8).numpy().data)

    def read(self, folder, order):
        mapped = np.memmap(folder / "raw.bin", np.uint8, mode="c").reshape(len(order), -1)
        return sum(touched(torch.from_numpy(mapped[index])) for index in order)


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
        for what in ("cold", "cached"):
            best = dict.fromkeys(kinds, float("inf"))
            for _ in range(options.repeats):  # in turn, so that a busy moment hits all
                for name, kind in kinds.items():
                    if what == "cold":
                        drop_from_cache(Path(base) / name)
                    seconds, checked = timed(lambda kind=kind, name=name: kind.read(Path(base) / name, order))
                    best[name] = min(best[name], seconds)
                    sums.add(checked)
            for name, seconds in best.items():
                found[name][what] = total / seconds / 1e9
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
    print(json.dumps({"gb": total / 1e9, "gb_per_second": found}))


if __name__ == "__main__":
    main()
