"""Throughput of `LLM.extract` against layers, depth, length, batch and model size, beside the GEMMs alone: what plots.py draws.

Run as: python benchmarks/sweep.py [--only layers,depth,length,batch,size] [--tokens 131072] > sweep.txt

Random weights (`load_format="dummy"`), so nothing is read or downloaded. Rows come back in memory; files are extract_gpu.py's
subject. Each point is the better of two runs after a warm-up; its ceiling is the blocks' matrix products with the batch's number of
rows. `--tiny` tries it on the CPU. Prints a line a point and one JSON line.
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
from workloads import QWEN3_8B, mixed_lengths, prompts

import layertap

LAYERS = [2, 18, 33, 36]
# hidden, intermediate, blocks, heads of the dense Qwen3 models; all have 8 key heads of 128
SIZES = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "8B": (4096, 12_288, 36, 32),
    "14B": (5120, 17_408, 40, 40),
    "32B": (5120, 25_600, 64, 64),
}
SWEEPS = ("layers", "depth", "length", "batch", "size")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shape_of(size: str, tiny: bool) -> dict:
    """The configuration of a model of this size."""
    hidden, inner, blocks, heads = SIZES[size]
    shape = QWEN3_8B | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
    }
    if tiny:
        shape |= {
            "hidden_size": hidden // 32,
            "intermediate_size": inner // 32,
            "num_attention_heads": 8,
            "head_dim": 16,
        }
    return shape


class Model:
    """One model, and the points measured with it."""

    def __init__(self, size: str, arguments: argparse.Namespace) -> None:
        self.size, self.tokens = size, arguments.tokens
        self.shape = shape_of(size, arguments.tiny)
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "config.json").write_text(json.dumps(self.shape))
        dtype = "bfloat16" if DEVICE == "cuda" else "float32"
        self.llm = layertap.LLM(self._folder.name, dtype=dtype, load_format="dummy")
        self._extractor = self.llm._front.engine._extractor
        self.llm._front.engine.routes()
        self.budget = self._extractor.budget_tokens
        work = prompts(mixed_lengths(self.tokens))
        for _ in range(1 + 150_000 // self.tokens if DEVICE == "cuda" else 0):
            self._seconds(work, [1])  # blocks are compiled after 150,000 tokens; one is enough for that

    def _seconds(self, work: list[list[int]], layers: list[int]) -> float:
        began = time.perf_counter()
        for sample in self.llm.extract(work, layers=layers):
            assert len(sample.token_ids) == len(work[sample.index])
        return time.perf_counter() - began

    def point(
        self, sweep: str, x: float | str, work: list[list[int]], layers: list[int], budget: int | None = None
    ) -> dict:
        """Measure one point."""
        self._extractor.budget_tokens = budget or self.budget
        tokens = sum(map(len, work))
        self._seconds(work, layers)
        rate = tokens / min(self._seconds(work, layers) for _ in range(2))
        rows = min(tokens, self._extractor.budget_tokens)
        ceiling = gemm_rate(self.shape, tokens, rows, max(layers), DEVICE)
        found = {
            "sweep": sweep,
            "x": x,
            "model": f"Qwen3-{self.size}",
            "tok_s": round(rate),
            "gemms_tok_s": round(ceiling),
            "of_gemms": round(rate / ceiling, 3),
        }
        print(json.dumps(found), flush=True)
        return found

    def close(self) -> None:
        """Free the device for the next."""
        self.llm.close()
        del self.llm, self._extractor
        self._folder.cleanup()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def points_of_8b(model: Model, wanted: list[str], longest: int) -> list[dict]:
    """All sweeps but that of the model's size."""
    mixed = prompts(mixed_lengths(model.tokens))
    blocks = model.shape["num_hidden_layers"]
    points = []
    if "layers" in wanted:
        for count in (1, 2, 4, 9, 18, 36):
            layers = [blocks - i * blocks // count for i in range(count)]
            points.append(model.point("layers", count, mixed, layers))
    if "depth" in wanted:
        points += [model.point("depth", depth, mixed, [depth]) for depth in (1, 2, 4, 9, 18, 27, 36)]
    if "length" in wanted:
        for length in (32, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768):
            if length <= min(longest, model.tokens):
                points.append(model.point("length", length, prompts([length] * (model.tokens // length)), LAYERS))
    if "batch" in wanted:
        short = prompts([256] * (model.tokens // 256))  # a longer prompt than the budget would go alone
        for budget in (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768):
            if budget <= model.tokens:
                points.append(model.point("batch", budget, short, LAYERS, budget))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SWEEPS))
    parser.add_argument("--tokens", type=int, help="of each point; default 131,072, with --tiny 512")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--tiny", action="store_true", help="small models and little work, to try it on the CPU")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (512 if arguments.tiny else 131_072)
    wanted = arguments.only.split(",")
    unknown = (set(wanted) - set(SWEEPS)) | (set(arguments.sizes.split(",")) - SIZES.keys())
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    points: list[dict] = []
    if set(wanted) - {"size"}:
        model = Model("8B", arguments)
        points += points_of_8b(model, wanted, arguments.longest)
        model.close()
    for size in arguments.sizes.split(",") if "size" in wanted else []:
        model = Model(size, arguments)
        blocks = model.shape["num_hidden_layers"]
        layers = [2, blocks // 2, blocks - 3, blocks]
        points.append(model.point("size", float(size[:-1]), prompts(mixed_lengths(model.tokens)), layers))
        model.close()
    result = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "tokens": arguments.tokens,
        "points": points,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
