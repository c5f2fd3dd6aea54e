"""Checkpoints of the zoo that vLLM's CPU attention can run: it wants heads of 32, so two of them instead of four of 16."""

import json
from pathlib import Path
from typing import Any

from layertap.testing import zoo

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 80, "head_dim": 64}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
ADJUSTED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {**_LATENT, "scoring_func": "softmax", "moe_layer_freq": 1},
    "deepseek_v3": {**_LATENT, **_SIGMOID},
    "falcon": {"ffn_hidden_size": 256},
    "falcon-alibi": {"ffn_hidden_size": 256},
    "falcon-new-decoder": {"ffn_hidden_size": 256},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {**_LATENT, **_SIGMOID, "first_k_dense_replace": 1},
    "lfm2": {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64},
    "llama4_text": {"attention_chunk_size": 128},
    "minicpm3": {"qk_nope_head_dim": 24, "qk_head_dim": 32},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
}
"""Fields that checkpoints on the hub have and transformers' own configuration leaves out, and sizes that vLLM computes with."""
ARCHITECTURES = {"phimoe": "PhiMoEForCausalLM"}
"""Where checkpoints on the hub name another class than transformers has, and vLLM goes by that."""


def vllm_config(name: str, **changes: Any) -> Any:
    """The zoo's configuration of a case with heads of 32."""
    config = zoo.config(name)
    for part in _parts(config):
        values = part.to_dict()
        if "attention_hidden_size" in values:  # Zamba2: twice as wide, so its heads are of 32 already
            continue
        for key in (*_HEADS, *_KEY_VALUE_HEADS):
            if isinstance(values.get(key), int) and not isinstance(values[key], bool):
                setattr(part, key, max(1, values[key] // 2))
        if values.get("head_dim") == 16:
            part.head_dim = 32
        for key, value in ADJUSTED.get(name, {}).items():
            setattr(part, key, value)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def save(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint; one that is there is kept."""
    import torch

    from layertap.testing.tokenizer import byte_tokenizer
    from layertap.testing.weights import randomise

    target = folder / f"{name}-vllm"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save_pretrained(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = zoo.model_class(name)(vllm_config(name, **changes)).float().eval()
    randomise(model, seed)
    if name == "phimoe":
        model.lm_head.bias.data.zero_()  # vLLM leaves it out
    model.tie_weights()
    model.save_pretrained(target)
    if name in ARCHITECTURES:
        path = target / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [ARCHITECTURES[name]]}))
    return target


def _parts(config: Any) -> list[Any]:
    text = config.get_text_config()
    return [config] if text is config else [text]
