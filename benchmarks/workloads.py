"""The workloads and the model shapes that the benchmarks share. Deterministic; token ids are random."""

from pathlib import Path

import numpy as np

VOCAB_SIZE = 151_936
MIXED_PROMPTS, MIXED_TOKENS, MIXED_LONGEST = 391, 402_886, 4096
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}


def mixed_lengths(total_tokens: int = MIXED_TOKENS) -> list[int]:
    """Log-normal lengths, mean 1,030, at most 4,096, summing to `total_tokens` exactly (391 prompts in all)."""
    rng = np.random.default_rng(0)
    raw = np.minimum(rng.lognormal(mean=6.58, sigma=0.85, size=MIXED_PROMPTS), MIXED_LONGEST)
    lengths = np.clip((raw * MIXED_TOKENS / raw.sum()).astype(int), 1, MIXED_LONGEST)
    while (rest := MIXED_TOKENS - int(lengths.sum())) != 0:
        step = 1 if rest > 0 else -1
        room = np.flatnonzero(lengths < MIXED_LONGEST if step > 0 else lengths > 1)[: abs(rest)]
        lengths[room] += step
    if total_tokens == MIXED_TOKENS:
        return [int(length) for length in lengths]
    chosen: list[int] = []
    for length in lengths:
        chosen.append(min(int(length), total_tokens - sum(chosen)))
        if sum(chosen) == total_tokens:
            return chosen
    raise ValueError(f"the mixed workload has {MIXED_TOKENS} tokens, not {total_tokens}")


def prompts(lengths: list[int], vocab_size: int = VOCAB_SIZE, seed: int = 1) -> list[list[int]]:
    """Random token ids of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, min(vocab_size, 150_000), length).tolist() for length in lengths]


def save_random_model(config: dict, folder: Path, device: str, seed: int = 0) -> Path:
    """A checkpoint of random weights in bfloat16, made on `device`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = dict(config)
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    return folder
