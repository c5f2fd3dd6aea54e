"""What capture costs vLLM: prefill and generation with and without it, alternating inside one engine (A B A B ...).

Run as: python benchmarks/vllm_overhead.py [--mode tap|plain|own] [--work mixed,generate,all] [--rounds 3] [--tp 1]

A is `capture: false`, B captures; both are the same engine, so heat and clocks are shared. `--mode plain` is vLLM without the
plugin, `--mode own` vLLM's own extraction: each a start of its own, for the ratio between engines. Per round: tokens per second
until vLLM returned, and until every file was published (readers delete the files meanwhile). Qwen3-8B's shape, random weights,
bfloat16. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workloads import QWEN3_8B, mixed_lengths, prompts

LAYERS = [2, 18, 33, 36]


def engine_options(args, folder: Path, layers) -> dict:
    """The options of vLLM's LLM for a mode."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 16_384,
        "max_num_batched_tokens": 16_384,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "tensor_parallel_size": args.tp,
        "pipeline_parallel_size": args.pp,
        "max_num_seqs": 256,
    }
    from vllm.config import KVTransferConfig

    if args.mode == "tap":
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="HiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "layers": layers,
                "shared_storage_path": args.store,
                "min_free_bytes": 1 << 28,
                "num_writer_processes": args.writers,
                "max_bytes_in_flight": None if args.in_flight is None else args.in_flight << 30,
            },
        )
    elif args.mode == "own":
        options["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        }
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"shared_storage_path": args.store},
        )
    return options


class Readers:
    """A thread that notes each file as soon as it is published, and others that delete it: 4 GB of pages take a while."""

    def __init__(self, store: Path) -> None:
        self.store, self.seen, self._stop = store, 0, threading.Event()
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._deleters = ThreadPoolExecutor(4)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self.sweep():
                time.sleep(0.002)

    def sweep(self) -> int:
        """Note what is new and have it deleted; temporary files are hidden and stay."""
        done = 0
        with self._lock:
            for entry in os.scandir(self.store) if self.store.is_dir() else ():
                if entry.name in self._known:
                    continue
                if entry.name.endswith(".safetensors") and not entry.name.startswith("."):
                    self._known.add(entry.name)
                    self._deleters.submit(os.unlink, entry.path)
                    done += 1
                elif entry.name.endswith(".error"):
                    raise RuntimeError(Path(entry.path).read_text())
            self.seen += done
        return done

    def wait(self, count: int, seconds: float = 120.0) -> None:
        """Until `count` files were seen."""
        deadline = time.monotonic() + seconds
        while self.seen < count:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError(f"{self.seen} of {count} files came")
            time.sleep(0.001)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._deleters.shutdown()


def one_round(llm, work, max_tokens: int, capture: bool | None, store: Path) -> tuple[float, float]:
    """Seconds until vLLM returned, and until every file was published."""
    from vllm import SamplingParams

    extra = None
    if capture is not None:
        wanted = {"capture": capture} if not capture else {"capture": True, "include_output_tokens": max_tokens > 1}
        extra = {"kv_transfer_params": wanted}
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra)
    readers = Readers(store)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in work], params, use_tqdm=False)
    returned = time.perf_counter() - began
    if capture:
        readers.wait(len(work))
    published = time.perf_counter() - began
    readers.close()
    return returned, published


def touch_memory(num_bytes: int) -> None:
    """Make the host hand out its memory once, before anything is timed."""
    block = bytearray(min(num_bytes, 64 << 20))
    shm = Path("/dev/shm/layertap-touch")
    with shm.open("wb") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
    shm.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="tap", choices=["tap", "plain", "own"])
    parser.add_argument("--work", default="mixed,generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--store", default="/dev/shm/layertap-overhead")
    parser.add_argument("--writers", type=int, help="writer processes (default: the engine's)")
    parser.add_argument("--in-flight", type=int, help="max_bytes_in_flight in GiB (default: the engine's)")
    parser.add_argument("--all-layers", action="store_true", help="take all 36 layers (with --work all)")
    args = parser.parse_args()
    store = Path(args.store)
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    free = shutil.disk_usage(store).free
    print(f"store {store}: {free / 2**30:.0f} GiB free", flush=True)
    if args.mode != "plain":
        touch_memory(min(free // 2, (48 if "all" in args.work else 16) << 30))
    from vllm import LLM

    layers = list(range(1, 37)) if args.all_layers or args.work == "all" else LAYERS
    began = time.perf_counter()
    llm = LLM(**engine_options(args, Path("/tmp/layertap-qwen3-8b-shape"), layers))
    cache = llm.llm_engine.vllm_config.cache_config
    result: dict = {
        "mode": args.mode,
        "layers": len(layers),
        "tp": args.tp,
        "pp": args.pp,
        "up_s": round(time.perf_counter() - began, 1),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
    }
    print(json.dumps(result), flush=True)
    works = {
        "mixed": (prompts(mixed_lengths()), 1),
        "all": (prompts(mixed_lengths(200_480)), 1),
        "half": (prompts(mixed_lengths(200_480)), 1),
        "long": (prompts([8192] * 64), 1),
        "generate": (prompts([256] * 256), 256),
    }
    for name in args.work.split(","):
        work, max_tokens = works[name]
        count = sum(map(len, work)) if max_tokens == 1 else len(work) * max_tokens
        sides = {"tap": [False, True], "plain": [None], "own": [None]}[args.mode]
        one_round(llm, work[: len(work) // 4], max_tokens, sides[-1] if args.mode == "tap" else None, store)  # warm-up
        rates: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for side in sides:
                returned, published = one_round(llm, work, max_tokens, side, store)
                label = {False: "off", True: "on", None: args.mode}[side]
                rates.setdefault(label, []).append(count / returned)
                if side:
                    rates.setdefault("on, published", []).append(count / published)
                print(
                    f"{name} {label}: {count / returned:,.0f} tok/s returned, {count / published:,.0f} published",
                    flush=True,
                )
        medians = {label: statistics.median(values) for label, values in rates.items()}
        spread = {label: (max(values) - min(values)) / statistics.median(values) for label, values in rates.items()}
        result[name] = {
            "median_tok_s": {label: round(value) for label, value in medians.items()},
            "spread": {label: round(value, 4) for label, value in spread.items()},
            "ratio_to_off": {label: round(value / medians["off"], 4) for label, value in medians.items()}
            if "off" in medians
            else None,
        }
        print(json.dumps({name: result[name]}), flush=True)
    print(json.dumps(result))
    shutil.rmtree(store, ignore_errors=True)


if __name__ == "__main__":
    main()
