"""Checkpoints of the zoo that vLLM's CPU attention can run: it wants heads of 32, so two of them instead of four of 16."""

from pathlib import Path
from typing import Any

from layertap.testing import zoo

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")


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
    model.tie_weights()
    model.save_pretrained(target)
    return target


def _parts(config: Any) -> list[Any]:
    text = config.get_text_config()
    return [config] if text is config else [text]
