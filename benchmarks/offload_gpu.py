"""Extraction with a model larger than the GPU's memory, beside the GEMMs alone: a 32B shape with the memory capped.

Run as: python benchmarks/offload_gpu.py [--blocks 32] [--caps 24,48] [--tokens 131072] [--repeats 2]

Every block has weights of its own (`load_format="dummy"`: made on the device, kept in host memory). The cap holds for the whole
process (`torch.cuda.set_per_process_memory_fraction`) and is told to the engine as `max_memory`; tokens, resident blocks and
compilation are the engine's choice. With fewer blocks than 64 the caps shrink with them (what isn't blocks doesn't, so that is
harder; `--same-caps` keeps them). Rows of the first blocks are checked against the same blocks kept on the device. The ceiling is
the blocks' matrix products alone, back to back, with weights on the device and the engine's own number of rows, timed as long as
the work. Prints a line a cap and one JSON line.
"""

import argparse
import gc
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
import transformers
from ceiling import gemm_rate
from workloads import QWEN3_32B, mixed_lengths, prompts

import layertap

GIB = 2**30
SHAPE = QWEN3_32B


def free() -> None:
    """Give back what nobody holds."""
    gc.collect()
    torch.cuda.empty_cache()


def extract(llm: layertap.LLM, work: list[list[int]], layers: list[int]) -> float:
    """Seconds until the last rows are in host memory."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for sample in llm.extract(work, layers=layers):
        assert sample.hidden_states.shape[0] == len(work[sample.index])
    return time.perf_counter() - began


def check(folder: Path, streamed: layertap.LLM) -> dict:
    """Rows after each of the first blocks, weights from the host, against the same weights on the device."""
    layers = [0, 1, 2, 3, 4]
    work = prompts([700, 33, 1, 256, 1024])
    mine = {sample.index: sample.hidden_states.float() for sample in streamed.extract(work, layers=layers)}
    engine = streamed._front.engine
    streamer = engine.weights.streamer
    # The same blocks, all of them moved to the device: what differs is only where their weights come from.
    streamer.arrange(range(4))
    resident = {sample.index: sample.hidden_states.float() for sample in streamed.extract(work, layers=layers)}
    worst = max(float((mine[i] - resident[i]).abs().max()) for i in mine)
    scale = max(float(resident[i].abs().max()) for i in mine)
    distinct = all(
        not torch.equal(resident[0][:, place], resident[0][:, place + 1]) for place in range(len(layers) - 1)
    )
    assert distinct
    assert worst == 0.0 or worst < 1e-2 * scale, f"rows differ by {worst} of {scale}"
    return {"largest_difference": worst, "largest_value": scale}


def case(folder: Path, cap: float, num_blocks: int, num_tokens: int, repeats: int) -> dict:
    """One cap."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap * GIB / total)
    torch.cuda.reset_peak_memory_stats()
    layers = [2, num_blocks // 2, num_blocks - 3, num_blocks]
    work = prompts(mixed_lengths(num_tokens))
    began = time.perf_counter()
    llm = layertap.LLM(str(folder), dtype="bfloat16", load_format="dummy", max_memory=f"{cap}GiB")
    engine = llm._front.engine
    engine.routes(num_blocks)
    loaded = time.perf_counter() - began
    plan, streamer = engine.plan, engine.weights.streamer
    assert streamer is not None, "all weights fit: nothing is streamed"
    first = []
    for _ in range(2 + 150_000 // num_tokens):  # blocks are compiled after 150,000 tokens; one block is enough for that
        first.append(extract(llm, work, [1]))
    first.append(extract(llm, work, layers))
    seconds = [extract(llm, work, layers) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated()
    copy = streamer.seconds_per_copy()
    halved_to = engine._extractor.budget_tokens
    torch.cuda.set_per_process_memory_fraction(1.0)  # the check keeps more blocks on the device
    checked = check(folder, llm)
    block_bytes = streamer.block_bytes
    llm.close()
    del llm, engine, streamer
    free()
    ceiling = gemm_rate(SHAPE, num_tokens, plan.tokens, num_blocks)
    free()
    rates = [round(num_tokens / one) for one in seconds]
    return {
        "cap_GiB": cap,
        "blocks": num_blocks,
        "resident": plan.resident,
        "tokens_a_forward": halved_to,  # less than planned only after an out of memory
        "tokens_planned": plan.tokens,
        "tokens_that_hide_copies": plan.needed,
        "load_s": round(loaded, 1),
        "first_runs_s": [round(one, 1) for one in first],
        "copy_ms_a_block": round(copy * 1e3, 2),
        "copy_GB_s": round(block_bytes / copy / 1e9, 1),
        "peak_GiB": round(peak / GIB, 2),
        "tok_s": rates,
        "gemms_tok_s": round(ceiling),
        "gemms_TFLOP_s": round(2 * ceiling * num_blocks * block_bytes / 2 / 1e12),
        "of_gemms": round(max(rates) / ceiling, 3),
        "rows": checked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--caps", default="24,48", help="GiB of device memory")
    parser.add_argument("--same-caps", action="store_true", help="don't shrink the caps with the blocks")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    results: dict = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SHAPE, "num_hidden_layers": arguments.blocks, "dtype": "bfloat16"}
        Path(folder, "config.json").write_text(json.dumps(settings))
        for cap in map(float, arguments.caps.split(",")):
            cap *= 1 if arguments.same_caps else arguments.blocks / SHAPE["num_hidden_layers"]
            found = case(Path(folder), cap, arguments.blocks, arguments.tokens, arguments.repeats)
            results["cases"].append(found)
            print(json.dumps(found), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
