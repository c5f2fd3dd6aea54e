"""Draft models and adapters of tiny random checkpoints, written without the libraries that vLLM reads them with."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_ADAPTED = ("q_proj", "v_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16


def save_eagle(target: Path, folder: Path, *, version: int) -> Path:
    """A random EAGLE (1) or EAGLE-3 head for a Llama checkpoint, which reads layers 1, 2 and 3."""
    config = json.loads((target / "config.json").read_text())
    hidden, wide, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"] * config["head_dim"]
    block, fed = ("midlayer.", 2 * hidden) if version == 3 else ("layers.0.", hidden)
    shapes = {
        "fc.weight": (hidden, (3 if version == 3 else 2) * hidden),
        **{f"{block}self_attn.{name}_proj.weight": (heads, fed) for name in "qkv"},
        f"{block}self_attn.o_proj.weight": (hidden, heads),
        f"{block}mlp.gate_proj.weight": (wide, hidden),
        f"{block}mlp.up_proj.weight": (wide, hidden),
        f"{block}mlp.down_proj.weight": (hidden, wide),
    }
    norms = [f"{block}post_attention_layernorm.weight"]
    if version == 3:
        shapes["lm_head.weight"] = (vocab, hidden)
        norms += ["norm.weight", f"{block}input_layernorm.weight", f"{block}hidden_norm.weight"]
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {name: torch.ones(hidden) for name in norms}, folder / "model.safetensors")
    config |= {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3" if version == 3 else "LlamaForCausalLM"],
    }
    if version == 3:
        config |= {"draft_vocab_size": vocab, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_near_copy(target: Path, folder: Path, *, noise: float) -> Path:
    """The checkpoint itself, a little off: a draft model that is sometimes right."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(target / "model.safetensors")
    for name, value in tensors.items():
        tensors[name] = value + noise * value.std() * torch.randn(value.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_adapter(model: Any, folder: Path, *, seed: int) -> Path:
    """A random LoRA adapter, in the layout of peft."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _ADAPTED:
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    config |= {"bias": "none", "target_modules": list(_ADAPTED), "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(model: Any, adapter: Path) -> Any:
    """Add the adapter to the weights of `model`: the oracle of a request that runs with it."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if "lora_A" in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            model.get_submodule(path).weight.data += ALPHA / RANK * up @ down
    return model
