"""Are the rows that the vLLM engine saves on a GPU the model's? Every runner, graph mode and cache state, beside transformers.

Run as: python benchmarks/vllm_gpu_check.py [--only v2-graphs,v1-eager,...] [--tokens 16]

Each variant starts one vLLM engine on a random model (Qwen3 blocks, 8 of them, hidden 1024, bfloat16) with a KV cache too small for
its load, and runs 64 requests of mixed lengths, layers and positions, with output rows. `v2-long` and `v1-long` take all layers of
long prompts instead, in steps that are large enough for digests on the device; `v2-8b` does that with the Qwen3-8B shape and four
layers. Each row is compared with transformers in float32 on the same GPU; transformers in bfloat16 gives the yardstick (the error
that bfloat16 alone makes). One JSON line each.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from workloads import QWEN3_8B, save_random_model

VARIANTS: dict[str, dict] = {
    "v2-eager": {"v2": 1, "options": {"enforce_eager": True}},
    "v2-graphs": {"v2": 1, "options": {}, "cache": "v2"},
    "v2-graphs-warm": {"v2": 1, "options": {}, "cache": "v2"},
    "v2-piecewise": {"v2": 1, "options": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}},
    "v2-after-plain": {"v2": 1, "options": {}, "plain_first": True},
    "v1-eager": {"v2": 0, "options": {"enforce_eager": True}},
    "v1-graphs": {"v2": 0, "options": {}},
    "v2-ngram": {
        "v2": 1,
        "options": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
    },
    "v1-ngram": {
        "v2": 0,
        "options": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
    },
    "v2-long": {"v2": 1, "options": {}, "long": True},
    "v1-long": {"v2": 0, "options": {}, "long": True},
    "v2-8b": {"v2": 1, "options": {}, "long": True, "model": "8b"},
    "tp2": {"v2": 1, "options": {"tensor_parallel_size": 2}, "gpus": 2},
    "pp2": {"v2": 1, "options": {"pipeline_parallel_size": 2}, "gpus": 2},
}
DEFAULT = [name for name, variant in VARIANTS.items() if variant.get("gpus", 1) == 1 and variant.get("model") != "8b"]
NUM_LAYERS, VOCAB = 8, 2048
WORK = Path("/tmp/layertap-vllm-check")
SMALL = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "initializer_range": 0.04,
    "bos_token_id": None,
    "eos_token_id": None,
}
# the 8B one may be there already, from extract_gpu.py
MODELS = {"small": (SMALL, WORK / "model"), "8b": (QWEN3_8B, Path("/dev/shm/layertap-bench-model"))}
LAYERS_8B = [2, 18, 33, 36]


def model_of(name: str) -> Path:
    """The variant's random checkpoint, made once."""
    config, target = MODELS[VARIANTS[name].get("model", "small")]
    if not (target / "config.json").exists():
        save_random_model(config, target, "cuda" if config is QWEN3_8B else "cpu")
    return target


def requests(name: str, max_tokens: int) -> list[tuple[list[int], dict]]:
    """64 prompts and their capture options; with a `long` variant 24 long prompts."""
    rng = random.Random(0)
    if VARIANTS[name].get("long"):
        lengths = [rng.randrange(300, 4096 - max_tokens) for _ in range(24)]
        return [([rng.randrange(VOCAB) for _ in range(length)], {}) for length in lengths]
    kinds = [
        {"include_output_tokens": True},
        {"layers": [8, 3], "include_output_tokens": True},
        {"layers": [0], "positions": "output"},
        {"layers": "last", "positions": "last"},
        {"layers": [1, 4, 7]},
        {"layers": [5, 2], "positions": [1, 3]},
        {"capture": False},
    ]
    found = []
    for index in range(64):
        length = min(2000, int(rng.lognormvariate(5.5, 1.0)) + 4)
        word = [rng.randrange(VOCAB) for _ in range(7)]
        prompt = (
            (word * (length // 7 + 1))[:length] if index % 3 == 0 else [rng.randrange(VOCAB) for _ in range(length)]
        )
        found.append((prompt, kinds[index % len(kinds)]))
    return found


def run_engine(name: str, max_tokens: int, plain: bool) -> None:
    """In a process of its own: one engine, all requests; writes what it produced for `compare`."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    variant = VARIANTS[name]
    store = WORK / f"states-{name}"
    shutil.rmtree(store, ignore_errors=True)
    options = dict(
        model=str(model_of(name)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        block_size=16,
        seed=0,
        **(
            {"max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.5}
            if variant.get("long")
            else {"max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.2, "num_gpu_blocks_override": 700}
        ),
        **variant["options"],
    )
    layers = LAYERS_8B if variant.get("model") == "8b" else "all"
    if not plain:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="HiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"layers": layers, "shared_storage_path": str(store)},
        )
    began = time.perf_counter()
    llm = LLM(**options)
    up = time.perf_counter() - began
    work = requests(name, max_tokens)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    if not plain:
        llm.generate(
            prompts[:8],
            SamplingParams(max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {"capture": False}}),
            use_tqdm=False,
        )  # fills the prefix cache
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if plain else {"kv_transfer_params": kind},
        )
        for _, kind in work
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if plain:
        print(json.dumps({"plain": name, "up_s": round(up, 1)}))
        return
    from layertap.files.read import read_file

    for output in outputs:
        if output.kv_transfer_params is not None:
            read_file(output.kv_transfer_params["hidden_states_path"], timeout=60)
    record = [
        {"tokens": [*output.prompt_token_ids, *output.outputs[0].token_ids], "params": output.kv_transfer_params}
        for output in outputs
    ]
    (WORK / f"{name}.json").write_text(json.dumps({"up_s": round(up, 1), "outputs": record}))


def compare(name: str, max_tokens: int) -> dict:
    """Rows against transformers in float32; the error of transformers in bfloat16 beside it."""
    import torch
    from transformers import Qwen3ForCausalLM

    from layertap.files.read import load_hidden_states, read_file

    found = json.loads((WORK / f"{name}.json").read_text())
    worst, worst_ratio, rows, files, replayed = 0.0, 0.0, 0, 0, 0
    models = [
        Qwen3ForCausalLM.from_pretrained(model_of(name), dtype=dtype).cuda().eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    problems = []
    for index, ((prompt, kind), output) in enumerate(zip(requests(name, max_tokens), found["outputs"], strict=True)):
        if kind.get("capture") is False:
            if output["params"] is not None:
                problems.append(f"request {index}: captured although it asked not to be")
            continue
        path = output["params"]["hidden_states_path"]
        loaded, info = load_hidden_states(path), read_file(path).info
        tokens = output["tokens"][:-1]
        end = len(tokens) if kind.get("include_output_tokens") or kind.get("positions") == "output" else len(prompt)
        span = {"last": (end - 1, end), "output": (len(prompt), end), "None": (0, end)}.get(
            str(kind.get("positions")), (1, 3)
        )
        every = LAYERS_8B if VARIANTS[name].get("model") == "8b" else list(range(NUM_LAYERS + 1))
        layers = kind.get("layers", every)
        layers = [NUM_LAYERS] if layers == "last" else layers
        if list(info.layers) != layers or loaded["token_ids"].tolist() != tokens[span[0] : span[1]]:
            problems.append(f"request {index}: layers {info.layers} or tokens differ")
            continue
        exact, rounded = (streams(model, tokens)[span[0] : span[1], layers] for model in models)
        mine = loaded["hidden_states"].cuda().float()
        error = (mine - exact).norm(dim=-1) / exact.norm(dim=-1)
        yardstick = ((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
        worst = max(worst, float(error.max()))
        worst_ratio = max(worst_ratio, float(error.max() / yardstick.clamp_min(1e-4)))
        rows += mine.shape[0] * mine.shape[1]
        files += 1
        replayed += int(info.facts.get("replayed_rows", "0"))
    return {
        "variant": name,
        "up_s": found["up_s"],
        "files": files,
        "rows": rows,
        "replayed_rows": replayed,
        "worst_error": round(worst, 5),
        "worst_over_bf16": round(worst_ratio, 2),
        "ok": not problems and worst_ratio < 1.3,
        "problems": problems[:3],
    }


def streams(model, tokens):
    """[tokens, layers, hidden] in float32: what enters each block, and what leaves the last."""
    import torch

    found = []
    hooks = [
        model.model.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    ]
    hooks += [
        layer.register_forward_hook(lambda _m, _a, out: found.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.model(torch.tensor([tokens], device="cuda"), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([row[0].float() for row in found], 1)


def start(name: str, max_tokens: int, plain: bool = False) -> None:
    """Run `run_engine` in a process with the variant's environment."""
    variant = VARIANTS[name]
    cache = WORK / "cache" / variant.get("cache", name)
    env = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": str(variant["v2"]),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, __file__, "--one", name, "--tokens", str(max_tokens), *(["--plain"] if plain else [])]
    log = WORK / f"{name}.log"
    with log.open("w") as sink:
        done = subprocess.run(command, env=env, stdout=sink, stderr=subprocess.STDOUT, timeout=300, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-40:])
        raise RuntimeError(f"exit {done.returncode}:\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DEFAULT))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--one")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if args.one:
        run_engine(args.one, args.tokens, args.plain)
        return
    for name in args.only.split(","):
        try:
            model_of(name)
            if VARIANTS[name].get("plain_first"):
                start(name, args.tokens, plain=True)
            start(name, args.tokens)
            print(json.dumps(compare(name, args.tokens)), flush=True)
        except Exception as exc:  # noqa: BLE001 - the other variants are still worth their time
            print(
                json.dumps({"variant": name, "ok": False, "problems": [f"{type(exc).__name__}: {exc}"[-3000:]]}),
                flush=True,
            )


if __name__ == "__main__":
    main()
