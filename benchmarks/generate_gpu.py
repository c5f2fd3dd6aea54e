"""Generation on the embedded engine with output rows: tokens per second until every file is published, and without capture.

Run as: python benchmarks/generate_gpu.py [--model DIR] [--store /dev/shm/layertap-generate] [--rounds 2]

256 prompts of 256 tokens, 256 generated each, greedy, layers 2, 18, 33, 36. Beside it, on the same card:
`vllm_overhead.py --mode plain --work generate`. Prints a table and one JSON line.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
import transformers
from workloads import QWEN3_8B, prompts, save_random_model

import layertap

LAYERS = [2, 18, 33, 36]


def one_round(llm: layertap.LLM, work: list[list[int]], num_tokens: int, capture: bool) -> float:
    """Output tokens per second."""
    wanted = {"capture": capture, **({"include_output_tokens": True, "layers": LAYERS} if capture else {})}
    params = layertap.SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": wanted},
    )  # fmt: skip
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in work], params, use_tqdm=False)
    for output in outputs if capture else ():
        path = output.kv_transfer_params["hidden_states_path"]
        layertap.load_hidden_states(path)
    rate = len(work) * num_tokens / (time.perf_counter() - began)
    for output in outputs if capture else ():
        layertap.cleanup_hidden_states(output.kv_transfer_params["hidden_states_path"])
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/layertap-bench-model"))
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/layertap-generate"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=256)
    args = parser.parse_args()
    if not args.model.exists():
        save_random_model(QWEN3_8B, args.model, "cuda")
        torch.cuda.empty_cache()
    llm = layertap.LLM(str(args.model), dtype="bfloat16", layers=LAYERS, storage=args.store)
    print(llm._front.engine.verdict(), flush=True)
    work = prompts([256] * args.num_prompts)
    one_round(llm, work[: args.num_prompts // 4], 8, True)
    rates: dict[str, list[int]] = {}
    for _ in range(args.rounds):
        for capture in (False, True):
            label = "output rows, files read" if capture else "no capture"
            rates.setdefault(label, []).append(round(one_round(llm, work, args.num_tokens, capture)))
            print(f"{label}: {rates[label][-1]:,} output tok/s", flush=True)
    llm.close()
    shutil.rmtree(args.store, ignore_errors=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
                      "transformers": transformers.__version__, "output_tok_s": rates}))  # fmt: skip


if __name__ == "__main__":
    main()
