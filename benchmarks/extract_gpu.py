"""How fast `LLM.extract` is on one GPU, beside the GEMMs alone: tokens per second until every file is published, read and verified.

Run as: python benchmarks/extract_gpu.py [--only mixed,early,all,long] [--model DIR] [--store /dev/shm/layertap-bench]

The ceiling is the blocks' matrix products alone, back to back, with the same rows, timed as long as the work. Rows are checked
once against plain transformers on the same GPU before anything is timed. Readers delete files as they go. Prints a table and one
JSON line.
"""

import argparse
import json
import multiprocessing
import platform
import shutil
import statistics
import threading
import time
from pathlib import Path

import torch
import transformers
from ceiling import gemm_rate
from workloads import QWEN3_8B, mixed_lengths, prompts, save_random_model

import layertap
from layertap.files.read import cleanup_hidden_states, verify_file

LAYERS = [2, 18, 33, 36]


class Readers:
    """Processes that verify every checksum of each file, then remove it. To be started before CUDA is set up."""

    def __init__(self, count: int = 8) -> None:
        context = multiprocessing.get_context("fork")
        self._paths, self._seen = context.SimpleQueue(), context.SimpleQueue()
        self._waiting = 0
        for _ in range(count):
            context.Process(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            path, tokens = self._paths.get()
            info = verify_file(path)
            cleanup_hidden_states(path)
            self._seen.put(info.num_rows * info.row_bytes if info.num_tokens == tokens else None)

    def put(self, path: Path, tokens: int) -> None:
        """Hand a file over."""
        self._waiting += 1
        self._paths.put((path, tokens))

    def wait(self) -> int:
        """Until all are verified and gone; the bytes of their rows."""
        sizes = [self._seen.get() for _ in range(self._waiting)]
        self._waiting = 0
        assert None not in sizes
        return sum(sizes)


def run(llm: layertap.LLM, work: list[list[int]], layers, store: Path | None, readers: Readers | None = None,
        save_dtype: str | None = None) -> dict:  # fmt: skip
    """One run; seconds until the last file is verified (or, without a store, until the last rows are in memory)."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    num_bytes = 0
    for sample in llm.extract(work, layers=layers, storage=store, save_dtype=save_dtype):
        if readers is not None:
            readers.put(sample.path, len(work[sample.index]))
        else:
            num_bytes += sample.result.rows.nbytes
    handed = time.perf_counter() - began
    if readers is not None:
        num_bytes = readers.wait()
    seconds = time.perf_counter() - began
    tokens = sum(len(ids) for ids in work)
    return {
        "tok_s": tokens / seconds,
        "tok_s_published": tokens / handed,
        "seconds": seconds,
        "GB_s": num_bytes / seconds / 1e9,
    }


def check(llm: layertap.LLM, folder: Path) -> float:
    """Largest median relative row error against plain transformers in bfloat16 and float32, both on this GPU."""
    work = prompts([700, 33, 1, 256, 1024])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cuda"})
    worst, worst_plain = 0.0, 0.0
    last = {}
    model.model.layers[-1].register_forward_hook(lambda module, args, output: last.update(rows=output))
    mine = {sample.index: sample.hidden_states.float() for sample in llm.extract(work, layers=LAYERS)}
    plain, exact = [], []
    for target in (plain, exact):
        for ids in work:
            with torch.no_grad():
                states = model(
                    torch.tensor([ids], device="cuda"), output_hidden_states=True, use_cache=False
                ).hidden_states
            rows = [states[layer][0] for layer in LAYERS[:-1]] + [last["rows"][0]]
            target.append(torch.stack(rows, 1).float().cpu())
        model = model.float()
    for index, (ours_bf16, oracle) in enumerate(zip(plain, exact, strict=True)):
        scale = oracle.norm(dim=-1)
        worst = max(worst, float(((mine[index] - oracle).norm(dim=-1) / scale).max()))
        worst_plain = max(worst_plain, float(((ours_bf16 - oracle).norm(dim=-1) / scale).max()))
    print(
        f"largest row error against float32: ours {worst:.2e}, plain transformers in bfloat16 {worst_plain:.2e}",
        flush=True,
    )
    assert worst < max(3e-2, 1.3 * worst_plain), "rows differ from the oracle's"
    del model
    torch.cuda.empty_cache()
    return worst


def warm_memory(store: Path, num_bytes: int = 20 << 30) -> None:
    """Touch and free the host's memory: a machine whose memory grows as it is used is slow the first time."""
    store.mkdir(parents=True, exist_ok=True)
    block = bytes(1 << 28)

    def fill(number: int) -> None:
        with (store / f"warm-{number}").open("wb") as file:
            for _ in range(num_bytes // 8 // len(block)):
                file.write(block)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for path in store.glob("warm-*"):
        path.unlink()


def main() -> None:
    readers = Readers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="mixed,early,all,long")
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/layertap-bench-model"))
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/layertap-bench"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save-dtype", help="run with files in this dtype, too, such as fp8_e4m3")
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if not arguments.model.exists():
        save_random_model(QWEN3_8B, arguments.model, "cuda")
        torch.cuda.empty_cache()
    warm_memory(arguments.store, (60 << 30) if "all" in wanted else (20 << 30))
    began = time.perf_counter()
    llm = layertap.LLM(str(arguments.model), dtype="bfloat16")
    results: dict = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if not arguments.skip_check:
        results["row_error"] = check(llm, arguments.model)
    print(f"loaded after {time.perf_counter() - began:.1f} s; {llm.info.dtype}", flush=True)
    mixed, part, long = prompts(mixed_lengths()), prompts(mixed_lengths(200_480)), prompts([8192] * 64)
    cases = {
        "mixed": (mixed, LAYERS),
        "early": (mixed, [1, 2, 3, 4]),
        "all": (part, "1-36"),
        "long": (long, LAYERS),
    }
    began = time.perf_counter()
    run(llm, mixed, LAYERS, None)
    print(f"first run, compiling: {time.perf_counter() - began:.1f} s", flush=True)
    for name in wanted:
        work, layers = cases[name]
        tokens = sum(len(ids) for ids in work)
        depth = 4 if name == "early" else 36
        run(llm, work, layers, arguments.store, readers)
        filed = [run(llm, work, layers, arguments.store, readers) for _ in range(arguments.repeats)]
        memory = [run(llm, work, layers, None) for _ in range(arguments.repeats)] if name != "all" else []
        other = []
        if arguments.save_dtype is not None:
            run(llm, work, layers, arguments.store, readers, arguments.save_dtype)
            other = [run(llm, work, layers, arguments.store, readers, arguments.save_dtype) for _ in filed]
        ceiling = gemm_rate(QWEN3_8B, tokens, 16_384, depth)
        rate = statistics.median(result["tok_s"] for result in filed)
        results[name] = {
            "tokens": tokens,
            "gemms_tok_s": ceiling,
            "files_tok_s": [round(result["tok_s"]) for result in filed],
            "published_tok_s": [round(result["tok_s_published"]) for result in filed],
            "other_dtype_files_tok_s": [round(result["tok_s"]) for result in other],
            "other_dtype_GB_s": [round(result["GB_s"], 2) for result in other],
            "memory_tok_s": [round(result["tok_s"]) for result in memory],
            "GB_s": round(statistics.median(result["GB_s"] for result in filed), 2),
            "of_gemms": round(rate / ceiling, 3),
        }
        print(name, json.dumps(results[name]), flush=True)
    llm.close()
    shutil.rmtree(arguments.store, ignore_errors=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
