"""Quantized checkpoints of a tiny Llama, made without the libraries that usually make them, and what both engines compare.

GPTQ and AWQ are a few lines of packing, so that nothing but these lines says what their codes mean; compressed-tensors writes its
own.
"""

import copy
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from layertap import LLM, SamplingParams, load_hidden_states
from layertap.testing.tokenizer import byte_tokenizer
from layertap.testing.weights import randomise

PROMPTS = [[9 + 3 * i + j for j in range(length)] for i, length in enumerate((6, 32, 17, 3))]
GROUP = 32
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CONFIGS = {
    "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


def small_llama(**changes):
    """Random weights in float32; heads of 32, which vLLM's CPU attention wants."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 512, **changes,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).float().eval()
    randomise(model, 0)
    return model


def own_rows(model, token_ids):
    """All layers of one prompt, by hooks on the blocks."""
    seen = []
    blocks = model.model.layers
    handles = [
        block.register_forward_pre_hook(lambda _, args, given: seen.append(args[0] if args else given["hidden_states"]),
                                        with_kwargs=True)
        for block in blocks
    ]  # fmt: skip
    handles.append(blocks[-1].register_forward_hook(lambda _, args, out: seen.append(out)))
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([rows[0] for rows in seen], dim=1)


def worst(rows, exact):
    """The largest relative error of a row."""
    return float(((rows.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def assert_rows_are_its_own(checkpoint, whole, reference, quantization, tolerance, folder):
    """Extracted and generated rows are those of the quantized model's own single forward, and not those of the whole one."""
    wanted = {"kv_transfer_params": {"include_output_tokens": True}}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, extra_args=wanted)
    extracted, generated = [], []
    with LLM(checkpoint, dtype="float32", layers="all", storage=folder / "states") as llm:
        assert llm.info.quantization == quantization
        for sample in llm.extract(PROMPTS, layers="all"):
            exact = own_rows(reference.eval(), PROMPTS[sample.index])
            extracted.append(worst(torch.as_tensor(np.asarray(sample.hidden_states)), exact))
            if sample.index == 1:  # the quantization is really on
                assert worst(exact, own_rows(whole, PROMPTS[1])) > 1e-2
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        for output in llm.generate(prompts, params, use_tqdm=False):
            loaded = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
            generated.append(worst(loaded["hidden_states"], own_rows(reference, loaded["token_ids"].tolist())))
    print(f"{checkpoint.name}: extracted {max(extracted):.1e}, generated {max(generated):.1e}")  # for docs/trust.md
    assert len(extracted) == len(generated) == len(PROMPTS)
    assert max(extracted + generated) < tolerance


def save_packed(whole, method, folder):
    """A GPTQ or AWQ checkpoint, and the model whose float32 weights are exactly its codes times their scales."""
    folder = Path(folder)
    state, exact = {}, copy.deepcopy(whole)
    for name, tensor in whole.state_dict().items():
        if not name.endswith("_proj.weight"):
            state[name] = tensor.clone()
            continue
        parts, weight = _gptq(tensor) if method == "gptq" else _awq(tensor)
        state |= {f"{name.removesuffix('.weight')}.{key}": part.contiguous() for key, part in parts.items()}
        exact.get_parameter(name).data = weight
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(whole.config.to_json_string(use_diff=False))
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {"quant_method": method, **CONFIGS[method]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(folder)
    return folder, exact


def _gptq(weight: Tensor):
    """Codes of 4 bits around 8, eight of one column in a word; of each zero point one less is stored."""
    groups = weight.unflatten(1, (-1, GROUP))  # [out, groups, GROUP]
    scales = (groups.abs().amax(-1) / 7).half()
    codes = ((groups / scales.float()[..., None]).round() + 8).clamp(0, 15)
    exact = ((codes - 8) * scales.float()[..., None]).flatten(1)
    words = _packed(codes.flatten(1).T.int().unflatten(0, (-1, 8)), 1)
    zeros = torch.full((groups.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {"qweight": words, "qzeros": zeros, "scales": scales.T, "g_idx": index}, exact


def _awq(weight: Tensor):
    """Codes of 4 bits with a zero point of each group, eight neighbours of one row in a word, in an order of their own."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    exact = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    rows = codes.flatten(1).T.int().unflatten(1, (-1, 8))[..., _AWQ_ORDER]
    points = zeros.T.int().unflatten(1, (-1, 8))[..., _AWQ_ORDER]
    return {"qweight": _packed(rows, 2), "qzeros": _packed(points, 2), "scales": scales.T}, exact


def _packed(codes: Tensor, dim: int) -> Tensor:
    """Eight codes in a word, the first in its lowest bits."""
    shape = [1] * codes.ndim
    shape[dim] = 8
    shifts = (4 * torch.arange(8, dtype=torch.int64)).view(shape)
    words = (codes.to(torch.int64) << shifts).sum(dim)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


COMPRESSED = {
    "int4": ({"num_bits": 4, "strategy": "group", "group_size": GROUP}, None),
    "int4-zero-points": ({"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}, None),
    "int8": ({"num_bits": 8, "strategy": "channel"}, None),
    "int8-activations": ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "fp8": ({"num_bits": 8, "type": "float", "strategy": "channel"}, None),
}


def save_compressed(whole, method, folder):
    """A checkpoint of compressed-tensors, by that package: the smallest and largest weights of a group give its scale."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    weights, activations = COMPRESSED[method]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    model = copy.deepcopy(whole)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        size = GROUP if weights["strategy"] == "group" else module.weight.shape[1]
        groups = module.weight.detach().unflatten(1, (-1, size))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    byte_tokenizer().save_pretrained(folder)
    return Path(folder)
