"""Extraction on several GPUs, one process each: tokens per second of all together beside one alone.

Run as: python benchmarks/data_parallel.py [--gpus 2] [--rounds 3] [--model DIR] [--store /dev/shm/layertap-dp]

Each process runs the whole mixed workload (layers 2, 18, 33, 36; files are verified and deleted by readers of its own). The rate of
n is n times the tokens over the time of the slowest. Prints a table and one JSON line.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
from pathlib import Path

from workloads import QWEN3_8B, mixed_lengths, prompts, save_random_model


def worker(rank: int, args: argparse.Namespace, start, seconds) -> None:
    """Load, compile, then run as often as the barrier opens."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    from extract_gpu import LAYERS, Readers, run, warm_memory

    import layertap

    readers, store, work = Readers(), args.store / str(rank), prompts(mixed_lengths())
    warm_memory(store)
    llm = layertap.LLM(str(args.model), dtype="bfloat16")
    run(llm, work, LAYERS, None)
    run(llm, work, LAYERS, store, readers)
    for together in [False, True] * args.rounds:
        start.wait()
        if together or rank == 0:
            seconds.put(run(llm, work, LAYERS, store, readers)["seconds"])
        start.wait()
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/layertap-bench-model"))
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/layertap-dp"))
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    if not args.model.exists():
        maker = context.Process(target=save_random_model, args=(QWEN3_8B, args.model, "cuda"))
        maker.start()
        maker.join()
    start, seconds = context.Barrier(args.gpus + 1), context.Queue()
    workers = [context.Process(target=worker, args=(rank, args, start, seconds)) for rank in range(args.gpus)]
    for process in workers:
        process.start()
    tokens = sum(mixed_lengths())
    rates: dict[int, list[float]] = {1: [], args.gpus: []}
    for together in [False, True] * args.rounds:
        count = args.gpus if together else 1
        start.wait()
        slowest = max(seconds.get() for _ in range(count))
        start.wait()
        rates[count].append(count * tokens / slowest)
        print(f"{count} GPU(s): {rates[count][-1]:,.0f} tok/s", flush=True)
    for process in workers:
        process.join()
    shutil.rmtree(args.store, ignore_errors=True)
    one, all_of_them = (statistics.median(rates[count]) for count in (1, args.gpus))
    print(json.dumps({"gpus": args.gpus, "tok_s": {str(k): [round(x) for x in v] for k, v in rates.items()},
                      "ratio": round(all_of_them / one, 3)}))  # fmt: skip


if __name__ == "__main__":
    main()
