"""What the generation loop of the embedded engine costs by itself: steps per second around a model that costs next to nothing.

Run as: python benchmarks/generate_cpu.py [--num-prompts 256] [--num-tokens 64] [--profile]

On a GPU generation with many sequences is bound by Python: the scheduler, the sampler, the rows, the hooks. Here the model is tiny
and its attention does nothing, so what is left is that Python, on one core. Timed is the
processor's time of the loop's thread, which other work on the machine hardly changes. Rounds with rows and without take turns. The
prefill is not timed. Prints a table and one JSON line; `--profile` says where the time goes.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import layertap
from layertap.engines.transformers import paged
from layertap.engines.transformers.engine import TransformersEngine
from layertap.engines.transformers.generate import GenerationOptions
from layertap.engines.transformers.trial import Verdict


def stand_in(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention that attends to nothing and keeps nothing."""
    return query.transpose(1, 2).contiguous(), None


def save_model(folder: Path, layers: int, hidden: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=hidden, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


class Watch:
    """Counts the loop's steps from the moment when every sequence generates."""

    def __init__(self, engine: TransformersEngine, sequences: int) -> None:
        self._generator = engine.generator
        self._sequences = sequences
        self._deliver = self._generator._deliver
        self.profile: cProfile.Profile | None = None
        self.steps, self.seconds, self._began, self._last = 0, 0.0, 0.0, 0.0
        self._generator._deliver = self._counted  # type: ignore[method-assign]

    def _counted(self, step: Any) -> None:
        drawn = len(self._generator._draws)
        self._deliver(step)
        now = time.thread_time()
        if drawn == self._sequences:
            if self._began:
                self.steps, self.seconds = self.steps + 1, now - self._began
            else:
                self._began = now
                if self.profile is not None:
                    self.profile.enable()
        elif self._began and self.profile is not None:
            self.profile.disable()

    def close(self) -> None:
        self._generator._deliver = self._deliver  # type: ignore[method-assign]


def one_round(llm: layertap.LLM, args: argparse.Namespace, capture: bool, profile: cProfile.Profile | None) -> float:
    """Milliseconds a step."""
    wanted = {"capture": capture, **({"include_output_tokens": True, "positions": "output"} if capture else {})}
    params = layertap.SamplingParams(
        max_tokens=args.num_tokens, temperature=0.0, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": wanted},
    )  # fmt: skip
    watch = Watch(llm._front.engine, args.num_prompts)
    watch.profile = profile
    prompts = [
        {"prompt_token_ids": [10 + (i + j) % 100 for j in range(args.prompt_len)]} for i in range(args.num_prompts)
    ]
    for output in llm.generate(prompts, params, use_tqdm=False):
        if capture:
            layertap.cleanup_hidden_states(output.kv_transfer_params["hidden_states_path"])
    watch.close()
    return watch.seconds / watch.steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the rows; the rest of the model is small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    paged._attention = stand_in
    cost: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder, "model"), args.layers, args.hidden)
        options = GenerationOptions(
            max_num_seqs=args.num_prompts, max_num_batched_tokens=8192, kv_cache_bytes=args.layers * 2**23
        )
        llm = layertap.LLM(
            Path(folder, "model"), dtype="float32", device="cpu", layers="all", storage=Path(folder, "rows"),
            generation=options, spot_check=0,
        )  # fmt: skip
        llm._front.engine.generator._verdict = Verdict("batched", paged.PAGED, "a stand-in", 0.0)
        for number in range(args.rounds):
            for capture in (False, True):
                label = "output rows" if capture else "no capture"
                profile = cProfile.Profile() if args.profile and number == args.rounds - 1 else None
                cost.setdefault(label, []).append(round(one_round(llm, args, capture, profile), 2))
                print(f"{label}: {cost[label][-1]:.2f} ms a step of {args.num_prompts} sequences", flush=True)
                if profile is not None:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        llm.close()
    print(json.dumps({"num_prompts": args.num_prompts, "torch": torch.__version__,
                      "transformers": transformers.__version__, "ms_per_step": cost}))  # fmt: skip


if __name__ == "__main__":
    main()
