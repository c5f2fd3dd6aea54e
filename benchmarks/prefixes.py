"""Samples that begin alike: time and bytes of an extraction with `share_prefixes` and without, one run, one model.

    python benchmarks/prefixes.py [--model MODEL] [--device cuda] [--scale 1.0]

Two inputs of random tokens: `groups`, 8 answers of 50 to 250 tokens to each of 12 prompts of 300 (GRPO), all behind a system prompt
of 100; and `system`, 96 chats of 50 to 200 tokens behind one system prompt of 300. Without --model a random Llama (4 blocks of
256) runs. The last line is JSON.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from layertap import LLM
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions


def tiny_model(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def inputs(scale):
    draw = random.Random(0)

    def tokens(count):
        return [draw.randrange(100, 2000) for _ in range(round(count * scale))]

    system = tokens(100)
    groups = [system + tokens(300) for _ in range(12)]
    yield "groups", [prompt + tokens(draw.randint(50, 250)) for prompt in groups for _ in range(8)]
    system = tokens(300)
    yield "system", [system + tokens(draw.randint(50, 200)) for _ in range(96)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="times the tokens of every piece")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as base:
        model = options.model or tiny_model(Path(base) / "model")
        with LLM(model, device=options.device) as llm:
            for name, samples in inputs(options.scale):
                path = Path(base) / f"{name}.jsonl"
                path.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in samples))
                for repeat in range(options.repeats):  # in turn, so that a busy moment hits both
                    for way in ("each", "shared"):
                        folder = Path(base) / f"{name}-{way}-{repeat}"
                        run = RunOptions(
                            layers=[2, -1], share_prefixes=way == "shared", shards=ShardOptions(fsync=False)
                        )
                        report = extract_dataset(llm, open_input(path), folder, run)
                        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
                        best = found.setdefault(name, {}).setdefault(way, {"seconds": float("inf")})
                        best |= {
                            "seconds": min(best["seconds"], report.seconds),
                            "bytes": size,
                            "tokens": report.num_tokens,
                        }
                        assert len(open_dataset(folder, verify=repeat == 0)) == len(samples)
    print(f"{'':8} {'tokens':>9} {'each, s':>9} {'shared, s':>10} {'faster':>7} {'smaller':>8}")
    for name, ways in found.items():
        each, shared = ways["each"], ways["shared"]
        faster, smaller = each["seconds"] / shared["seconds"], each["bytes"] / shared["bytes"]
        print(
            f"{name:8} {each['tokens']:9,} {each['seconds']:9.2f} {shared['seconds']:10.2f} {faster:7.2f} {smaller:8.2f}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
