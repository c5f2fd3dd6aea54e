"""Checkpoints of the zoo that vLLM's CPU attention can run: it wants heads of 32, so two of them instead of four of 16."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layertap.testing import zoo

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 80, "head_dim": 64}
_ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""vLLM's CPU kernel of the default rotary table takes each head of queries with a dimension for heads for a token of its own."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_FACTORS = [1.0 + 0.1 * i for i in range(16)]
ADJUSTED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {**_LATENT, "scoring_func": "softmax", "moe_layer_freq": 1, "rope_parameters": _YARN},
    "deepseek_v3": {**_LATENT, **_SIGMOID, "rope_parameters": _YARN},
    "doge": {"keep_window_size": 256},  # vLLM's backend attends to all tokens
    "falcon": {"ffn_hidden_size": 256},
    "falcon-alibi": {"ffn_hidden_size": 256},
    "falcon-new-decoder": {"ffn_hidden_size": 256},
    "glm4_moe": {"head_dim": 32},
    # transformers has 1e-6 in the two norms of MLA whatever the configuration says, vLLM doesn't
    "glm4_moe_lite": {
        **_LATENT,
        **_SIGMOID,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _YARN,
    },
    "lfm2": {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64, **_ONE_HEAD},
    "lfm2_moe": _ONE_HEAD,
    "llama4_text": {"attention_chunk_size": 128, "attn_temperature_tuning": False},  # vLLM: only beyond 32,768 tokens
    "mamba2": {"n_groups": 1},  # transformers' gated norm has one group whatever the configuration says
    "minicpm3": {"qk_nope_head_dim": 24, "qk_head_dim": 32},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral3": {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}},
    "moshi": {"sliding_window": 256},  # vLLM's backend has windows only where `layer_types` says so
    "phi3-longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": _FACTORS,
            "long_factor": [2 * factor for factor in _FACTORS],
            "partial_rotary_factor": 1.0,
        },
        "max_position_embeddings": 256,
    },
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},  # vLLM's class has no windows
}
"""Fields that checkpoints on the hub have and transformers' own configuration leaves out, and sizes that vLLM computes with."""
ONLY_VLLM: dict[str, dict[str, Any]] = {"cohere2": {"sliding_window": 7}, "cohere2_moe": {"sliding_window": 7}}
"""What vLLM has to be told so that it computes what transformers does: of a window of n tokens it makes one of n + 1."""


def _long_factors(model: Any) -> None:
    config = model.config
    config.rope_parameters = {**config.rope_parameters, "short_factor": config.rope_parameters["long_factor"]}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def _exact_gelu(model: Any) -> None:
    import torch

    for block in model.transformer.h:
        block.mlp.gelu_impl = torch.nn.GELU()


def _no_least_time_step(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))


def _activation_in_bfloat16(model: Any) -> None:
    import torch

    def half(number: Any) -> Any:
        return number.to(torch.bfloat16)

    for block in model.model.layers:
        function = block.mlp.act_fn
        beta = half(function.beta)
        for number, least in ((function.alpha_p, 0 * beta), (function.alpha_n, beta)):
            used = least + torch.nn.functional.softplus(half(number.data))
            number.data = (used.float() - least.float()).expm1().log()  # what comes to that in float32


ONLY_ORACLE: dict[str, Callable[[Any], None]] = {
    "apertus": _activation_in_bfloat16,
    "bloom": _exact_gelu,
    "phi3-longrope": _long_factors,
    "zamba2": _no_least_time_step,
}
"""What transformers' model has to be made to compute what vLLM does, where no configuration says it (docs/vllm-models.md)."""
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
