"""vLLM's own yardstick for hidden states, against a running server: clients that ask, read the file, reduce and delete it.

Run as: python benchmarks/vllm_yardstick.py --mode ours|plain|own [--rounds 3] [--shape 8b|tiny]

64 prompts of 8,192 random tokens, max_tokens=1, four layers, 8 client processes, files under /dev/shm. `ours` is `layertap serve
--engine vllm`, and alternates requests with and without capture in one server; `plain` is `vllm serve`; `own` is `vllm serve` with
vLLM's own extraction. The slowdown factor is the time with files over the time without. Random weights. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from workloads import QWEN3_8B

from layertap.testing.tokenizer import byte_tokenizer

CLIENTS, PROMPTS = 8, 64
SHAPES = {
    "8b": (QWEN3_8B, 8192, [2, 18, 33, 36]),
    "tiny": (
        {
            **QWEN3_8B,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 2048,
        },
        64,
        [1, 2, 3, 4],
    ),
}


def command(args: argparse.Namespace, model: Path, layers: list[int], length: int) -> list[str]:
    """How the server of a mode is started."""
    common = [
        "--port",
        str(args.port),
        "--host",
        "127.0.0.1",
        "--load-format",
        "dummy",
        "--max-model-len",
        str(length + 64),
    ]
    common += [
        "--dtype",
        "bfloat16",
        "--max-num-batched-tokens",
        str(max(2048, 2 * length)),
        "--no-enable-prefix-caching",
    ]
    if args.mode == "ours":
        storage = ["--layers", ",".join(map(str, layers)), "--storage", str(args.store)]
        ours = ["from layertap.cli import main; main()", "serve", str(model), "--engine", "vllm", *storage]
        return [sys.executable, "-c", *ours, *common]
    extraction = []
    if args.mode == "own":
        draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
        speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(args.store)},
        }
        extraction = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *extraction, *common]


def ask(url: str, mode: str, capture: bool, prompt: list[int]) -> float:
    """One request of a client; with capture, until its file is read, reduced and deleted. Returns the mean of the rows."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    if mode == "ours":
        body["kv_transfer_params"] = {"capture": capture}
    answer = httpx.post(url, json=body, timeout=300)
    answer.raise_for_status()
    if not capture:
        return 0.0
    params = answer.json().get("kv_transfer_params") or answer.json()["choices"][0]["kv_transfer_params"]
    path = params["hidden_states_path"]
    if mode == "ours":
        from layertap import cleanup_hidden_states, load_hidden_states
    else:
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            cleanup_hidden_states,
            load_hidden_states,
        )
    loaded = load_hidden_states(path)
    if loaded["token_ids"].tolist()[: len(prompt)] != prompt:
        raise ValueError("the file is of another prompt")
    mean = float(loaded["hidden_states"].float().mean())
    cleanup_hidden_states(path)
    return mean


def wait_until_up(process: subprocess.Popen, base: str) -> None:
    """Until the server answers."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the server ended")
        try:
            if httpx.get(base + "/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise SystemExit("the server didn't come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["ours", "plain", "own"], default="ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--port", type=int, default=8411)
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/layertap-yardstick"))
    args = parser.parse_args()
    shape, length, layers = SHAPES[args.shape]
    model = args.store.with_name(args.store.name + "-model")
    model.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(shape["vocab_size"]).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(shape))
    args.store.mkdir(parents=True, exist_ok=True)
    base = f"http://127.0.0.1:{args.port}"
    rng = np.random.default_rng(0)
    work = [rng.integers(10, min(shape["vocab_size"], 2000), length).tolist() for _ in range(PROMPTS)]
    process = subprocess.Popen(
        command(args, model, layers, length), env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
    )
    seconds: dict[str, list[float]] = {}
    try:
        with ProcessPoolExecutor(CLIENTS) as clients:
            wait_until_up(process, base)
            kinds = {"ours": [False, True], "plain": [False], "own": [True]}[args.mode]
            for number in range(args.rounds + 1):
                for capture in kinds:
                    began = time.perf_counter()
                    asked = [
                        clients.submit(ask, base + "/v1/completions", args.mode, capture, prompt) for prompt in work
                    ]
                    means = [future.result() for future in asked]
                    took = time.perf_counter() - began
                    if number:  # the first is warm-up
                        seconds.setdefault("with files" if capture else "without", []).append(took)
                        print(
                            f"{'with files' if capture else 'without'}: {took:.2f} s (mean {statistics.mean(means):.4f})",
                            flush=True,
                        )
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(args.store, ignore_errors=True)
        shutil.rmtree(model, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    slowdown = medians["with files"] / medians["without"] if len(medians) == 2 else None
    result = {
        "mode": args.mode,
        "prompts": PROMPTS,
        "length": length,
        "seconds": seconds,
        "slowdown": slowdown and round(slowdown, 4),
    }
    result["tok_s"] = {name: round(PROMPTS * length / value) for name, value in medians.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
