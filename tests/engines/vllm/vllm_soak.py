"""Many requests of random shapes through one small engine, with preemption, prefix hits and aborts: every row against the oracle.

`python tests/engines/vllm/vllm_soak.py features --requests 2000` runs a scenario in a process of its own and prints one JSON line;
`--compiled` with torch.compile on (it takes minutes to start). Scenarios:

- features: adapters and the base model, n-gram speculation, rows of cached blocks, capture only on request;
- drafts: the same without adapters, beside which vLLM's CPU build compiles nothing;
- grammars: rows of cached blocks;
- hybrid: state-space and attention layers, rows of cached blocks. Not on the CPU: there vLLM 0.32 fails with an index out of range
  when prefix caching of state-space layers is on.

In each of them some requests have structured output of three kinds, stop strings, or two choices.
"""

import argparse
import ctypes
import gc
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoints
import drafts
import running

from layertap import load_hidden_states
from layertap.errors import HiddenStatesError
from layertap.testing import oracle
from layertap.testing.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
IN_FLIGHT = 24
PREFIX_BYTES = 600_000
"""Enough for the beginnings that are asked for most, too little for all blocks."""
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_XGRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
_REPEATING = "no, no, no, no, no"
"""Drafts of n-grams come true in it."""
_PAIRS = [{"a": a, "b": b} for a in (1, 22) for b in ("x", "yz")]
GRAMMARS: tuple[tuple[dict[str, Any], frozenset[str]], ...] = (
    ({"choice": ["yes", _REPEATING, "n"]}, frozenset(["yes", _REPEATING, "n"])),
    ({"regex": "[a-c]{2}-[0-9]"}, frozenset(f"{a}{b}-{n}" for a in "abc" for b in "abc" for n in range(10))),
    (
        {
            "json": {
                "type": "object",
                "properties": {"a": {"enum": [1, 22]}, "b": {"enum": ["x", "yz"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        },
        # with spaces in some versions
        frozenset(json.dumps(pair, separators=way) for pair in _PAIRS for way in ((",", ":"), (", ", ": "))),
    ),
)
"""Structured output, and every text that it may end as."""
_ON_REQUEST = {"prefix_rows_bytes": PREFIX_BYTES, "capture_by_default": False}
_DRAFTS = {"speculative_config": _NGRAM, "structured_outputs_config": _XGRAMMAR, "num_gpu_blocks_override": 16}
SCENARIOS: dict[str, dict[str, Any]] = {
    "features": {
        "model": "llama",
        "extra": _ON_REQUEST,
        "options": {
            **_DRAFTS,
            "enable_lora": True,
            "max_loras": 3,  # the last one stays empty: vLLM's CPU build runs requests without an adapter through it
            "max_lora_rank": drafts.RANK,
        },
    },
    "drafts": {"model": "llama", "extra": _ON_REQUEST, "options": _DRAFTS},
    "grammars": {
        "model": "llama",
        "extra": {"prefix_rows_bytes": PREFIX_BYTES},
        "options": {"structured_outputs_config": _XGRAMMAR},
    },
    "hybrid": {
        "model": "granitemoehybrid",
        "extra": {"prefix_rows_bytes": 4 * PREFIX_BYTES},
        "options": {
            "enable_prefix_caching": True,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "structured_outputs_config": _XGRAMMAR,
        },
        "beginning": 600,  # vLLM makes its blocks large here
    },
}


class Shapes:
    """Random requests; some prompts begin alike, some repeat words."""

    def __init__(self, seed: int, num_layers: int = 5, beginning: int = 96) -> None:
        self.rng = random.Random(seed)
        self._layers = num_layers
        self._words = [[self.rng.randrange(8, 264) for _ in range(9)] for _ in range(5)]
        self._beginnings = [[self.rng.randrange(8, 264) for _ in range(beginning)] for _ in range(3)]

    def prompt(self) -> list[int]:
        """Token ids."""
        rng = self.rng
        length = rng.choice([2, 7, 20, 35, 64, 65, 90])
        kind = rng.random()
        if kind < 0.35:
            return (rng.choice(self._words) * 20)[:length]
        own = [rng.randrange(8, 264) for _ in range(length)]
        if kind > 0.6:
            return own
        shared = rng.choice(self._beginnings)
        return [*shared[: rng.choice([3 * len(shared) // 4, len(shared)])], *own]

    def options(self, length: int) -> tuple[str, dict[str, Any]]:
        """Kind of rows, and capture options."""
        rng = self.rng
        some = rng.sample(range(self._layers), rng.randint(1, self._layers))
        options: dict[str, Any] = {"layers": some if rng.random() < 0.4 else rng.choice([[3, 1], [1]])}
        kind = rng.choice(["prompt", "all", "last", "output", "span"])
        if kind in {"all", "output"}:
            options["include_output_tokens"] = True
        if kind in {"last", "output"}:
            options["positions"] = kind
        if kind == "span":
            end = rng.randint(1, length)
            options["positions"] = [rng.randrange(end), end]
        return kind, options


def expected_rows(kind: str, options: dict[str, Any], prompt_len: int, num_tokens: int) -> slice:
    """Positions that are owed."""
    end = num_tokens - 1 if options.get("include_output_tokens") else prompt_len
    if kind == "last":
        return slice(end - 1, end)
    if kind == "output":
        return slice(prompt_len, end)
    return slice(*options["positions"]) if kind == "span" else slice(0, end)


def worst_error(model: Any, path: str, tokens: list[int], layers: list[int], rows: slice) -> float:
    """Of a file's rows against the oracle's."""
    loaded = load_hidden_states(path, timeout=60)
    assert loaded["token_ids"].tolist() == tokens[:-1][rows], path
    wanted = oracle.hidden_states(model, tokens[:-1], layers)[rows]
    error = (loaded["hidden_states"] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(error.max()) if len(error) else 0.0


def run(
    core: Any,
    models: list[Any],
    storage: Path,
    count: int,
    shapes: Shapes,
    *,
    lora: list[Any] | None = None,
    on_request: bool = False,
    grammars: bool = False,
    first: int = 0,
) -> dict[str, int]:
    """Send `count` requests, abort a few, check every file. Some have two choices or a stop string, whose files a tag finds.

    Args:
        core: vLLM's LLMEngine.
        models: the oracle of each of `lora`.
        storage: of the engine.
        count: of requests.
        shapes: of requests.
        lora: adapters, None for the base model.
        on_request: nothing is captured by default, and some requests don't ask for it.
        grammars: some requests have structured output.
        first: number of the first one.
    """
    rng, lora = shapes.rng, lora or [None]
    waiting = [f"soak-{index}" for index in range(first, first + count)]
    asked: dict[str, Any] = {}
    aborted: set[str] = set()
    kinds = ("checked", "rows", "uncaptured", "cached_tokens", "structured", "stopped", "choices", "ended_by_vllm")
    found = dict.fromkeys(kinds, 0)
    texts: dict[str, frozenset[str]] = {}
    while waiting or core.has_unfinished_requests():
        while waiting and len(asked) - len(aborted) < IN_FLIGHT:
            name = waiting.pop(0)
            prompt = shapes.prompt()
            kind, options = shapes.options(len(prompt))
            which = rng.randrange(len(lora))
            captured = not on_request or rng.random() < 0.85
            sampling = running.params(
                rng.randint(1, 12),
                temperature=rng.choice([0.0, 1.0]),
                **({**options, "capture": True} if on_request and captured else options if captured else {}),
            )
            if grammars and rng.random() < 0.4:
                texts[name] = constrain(sampling, rng)
            elif rng.random() < 0.35:
                split_or_stop(sampling, rng, name, captured=captured)
            core.add_request(name, {"prompt_token_ids": prompt}, sampling, lora_request=lora[which])
            asked[name] = (prompt, kind, options, which, captured)
        if rng.random() < 0.03:
            name = rng.choice(sorted(set(asked) - aborted))
            core.abort_request([name])
            aborted.add(name)
        for output in core.step():
            if not output.finished or output.request_id in aborted:
                continue
            prompt, kind, options, which, captured = asked.pop(output.request_id)
            if output.outputs[0].finish_reason == "error":
                check_told(output.kv_transfer_params if captured else None)
                found["ended_by_vllm"] += 1
                continue
            found["choices"] += len(output.outputs) - 1
            found["stopped"] += sum(isinstance(choice.stop_reason, str) for choice in output.outputs)
            if output.request_id in texts:
                check_text(output.outputs[0], texts.pop(output.request_id))
                found["structured"] += 1
            if not captured:
                assert output.kv_transfer_params is None
                found["uncaptured"] += 1
                continue
            for choice, path in zip(output.outputs, paths_of(output, storage), strict=True):
                tokens = [*prompt, *choice.token_ids]
                rows = expected_rows(kind, options, len(prompt), len(tokens))
                error = worst_error(models[which], path, tokens, options["layers"], rows)
                assert error < running.TOLERANCE, (output.request_id, kind, options, which, error)
                found["rows"] += len(tokens[:-1][rows]) * len(options["layers"])
            found["checked"] += 1
            found["cached_tokens"] += output.num_cached_tokens or 0
    assert found["checked"] + found["uncaptured"] + found["ended_by_vllm"] == count - len(aborted)
    return {**found, "aborted": len(aborted)}


def check_told(handle: dict[str, str] | None) -> None:
    """vLLM gave a request up: of drafts and grammars together, 0.32 now and then samples a token that its grammar refuses."""
    if handle is None:
        return
    try:
        load_hidden_states(handle["hidden_states_path"], timeout=60)
    except HiddenStatesError as exc:
        assert "the engine ended the request with 'error'" in str(exc), exc
    else:
        raise AssertionError(f"{handle}: rows of a request that vLLM gave up")


def check_left_behind(storage: Path) -> None:
    """Each lock has its file or says why there is none; nothing temporary is left."""
    for lock in storage.glob("*.lock"):
        target = lock.with_name(lock.name.removesuffix(".lock"))
        if target.exists():
            continue
        try:
            load_hidden_states(target, timeout=60)
        except HiddenStatesError as exc:
            assert "aborted" in str(exc) or "the engine ended the request with 'error'" in str(exc), exc
        else:
            raise AssertionError(f"{target}: neither rows nor a reason")
    assert not list(storage.glob(".*"))


def split_or_stop(sampling: Any, rng: random.Random, name: str, *, captured: bool) -> None:
    """Ask for two choices, or for an end at one of many letters; with a tag, for vLLM has no room for these handles."""
    from vllm.sampling_params import RequestOutputKind

    if rng.random() < 0.5:
        sampling.n, sampling.temperature = 2, 1.0
        sampling.output_kind = RequestOutputKind.FINAL_ONLY  # both at once
    else:
        sampling.stop, sampling.output_text_buffer_length = rng.sample("abcdefghijklmnopqrstuvwxyz", 8), 0
    if captured:
        sampling.extra_args["kv_transfer_params"]["tag"] = name


def paths_of(output: Any, storage: Path) -> list[str]:
    """The file of each choice."""
    record = storage / "tags" / f"{output.request_id}.json"
    handles = json.loads(record.read_text())["handles"] if record.exists() else [output.kv_transfer_params]
    return [handle["hidden_states_path"] for handle in handles]


def constrain(sampling: Any, rng: random.Random) -> frozenset[str]:
    """Give a request one of the grammars, and room to end by it, mostly; returns what it may say."""
    from vllm.sampling_params import StructuredOutputsParams

    kind, texts = rng.choice(GRAMMARS)
    sampling.structured_outputs = StructuredOutputsParams(**kind)
    sampling.ignore_eos = False
    sampling.max_tokens = rng.randint(1, 24)
    return texts


def check_text(choice: Any, texts: frozenset[str]) -> None:
    """A structured answer is one of these, or the beginning of one if it had no room."""
    said = TOKENIZER.decode(choice.token_ids, skip_special_tokens=True)  # `text` begins with what the prompt left open
    whole = choice.finish_reason == "stop"
    assert said in texts if whole else any(text.startswith(said) for text in texts), choice


def footprint() -> dict[str, int]:
    """Open files and anonymous memory of this process, after what can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "anonymous_mib": int(found[1]) // 1024}


def published() -> dict[str, int]:
    """What this process's engine published, lost, and still holds."""
    from layertap.engines.vllm import worker

    (tap,) = (tap for tap in worker._taps.values() if tap is not None)
    counts = tap.counts()
    lost = {name: int(value) for name, value in counts.items() if name.startswith("failures.") and value}
    held = {"held_cells": tap.tap.host_ring.used, "held_bytes": int(counts["in_flight_bytes"])}
    return {"files": int(counts["files"]), **lost, **held}


def run_scenario(name: str, count: int, *, compiled: bool, seed: int) -> dict[str, Any]:
    """One engine, in this process."""
    scenario = SCENARIOS[name]
    folder = Path(tempfile.mkdtemp(prefix="layertap-soak-"))
    checkpoint = checkpoints.save(scenario["model"], folder, max_position_embeddings=1024)
    models, lora = [running.load_oracle(scenario["model"], checkpoint)], [None]
    if scenario["options"].get("enable_lora"):
        from vllm.lora.request import LoRARequest

        for index in (1, 2):
            adapter = drafts.save_adapter(models[0], folder / str(index), seed=index)
            models.append(drafts.merge(running.load_oracle(scenario["model"], checkpoint), adapter))
            lora.append(LoRARequest(f"adapter-{index}", index, str(adapter)))
    storage = folder / "states"
    options = {"block_size": 32, "num_gpu_blocks_override": 12, **scenario["options"]}
    if scenario["model"] == "granitemoehybrid":  # vLLM chooses its blocks
        options = dict(scenario["options"])
    shapes = Shapes(seed, beginning=scenario.get("beginning", 96))
    with running.running(
        checkpoint, storage, scenario["extra"], enforce_eager=not compiled, disable_log_stats=False, **options
    ) as llm:
        core = llm.llm_engine
        mode = core.vllm_config.compilation_config.mode
        assert bool(mode) is compiled, f"asked for compiled={compiled}, vLLM's mode is {mode!r}"
        asked = {"lora": lora, "on_request": scenario["extra"] is _ON_REQUEST, "grammars": True}
        found: dict[str, Any] = run(core, models, storage, count // 10, shapes, **asked)
        found["early"] = footprint()
        rest = run(core, models, storage, count - count // 10, shapes, first=count // 10, **asked)
        found |= {what: found[what] + number for what, number in rest.items()}
        found["late"] = footprint()
        check_left_behind(storage)
        found |= published()
        scheduler = core.engine_core.engine_core.scheduler
        found["block_size"] = scheduler.kv_cache_manager.block_pool.hash_block_size
        found |= {name: int(value) for name, value in scheduler.connector._plan.counts().items()}
        counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        found["preempted"] = int(counted["vllm:num_preemptions"])
        for what in ("draft", "accepted"):
            found[what] = int(counted.get(f"vllm:spec_decode_num_{what}_tokens", 0))
    return {"scenario": name, "compiled": compiled and mode.name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--seed", type=int, default=11)
    asked = parser.parse_args()
    running.set_environment()
    found = run_scenario(asked.scenario, asked.requests, compiled=asked.compiled, seed=asked.seed)
    print(f"\nRESULT {json.dumps(found)}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
