"""Prompts with images, through `LLM(engine="vllm")`: rows at the placeholders, and what a vision model adds between blocks."""

import importlib.util

import numpy as np
import pytest
import torch
from running import TOLERANCE

from layertap import LLM, SamplingParams, load_hidden_states
from layertap.testing.tokenizer import byte_tokenizer
from layertap.testing.weights import randomise

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="torchvision isn't installed: vLLM's Qwen-VL classes import it",
)
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def save(kind, folder):
    """A tiny random checkpoint with its processor."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    names = {"image_token_id": TOKENS[3], "video_token_id": TOKENS[4]}
    names |= {"vision_start_token_id": TOKENS[0], "vision_end_token_id": TOKENS[1]}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    text |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256, "bos_token_id": 1}
    text |= {"eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"hidden_size": 64, "num_heads": 2, "patch_size": 16 if kind == "Qwen3VL" else 14}
    if kind == "Qwen3VL":
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"depth": 3, "out_hidden_size": 64, "intermediate_size": 96, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0, 1]}
    else:
        vision |= {"depth": 2, "embed_dim": 64, "mlp_ratio": 2}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessor(
        patch_size=vision["patch_size"],
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=28 * 28 * 4,
        max_pixels=28 * 28 * 16,
    )
    videos = (Qwen3VLVideoProcessor if kind == "Qwen3VL" else Qwen2VLVideoProcessor)()
    processor = getattr(transformers, f"{kind}Processor")(images, tokenizer, videos)
    processor.save_pretrained(folder)
    return model, processor


def image(seed, width=60, height=40):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def oracle_rows(model, inputs):
    """What enters each block of the text decoder, and what leaves the last."""
    blocks, rows, hooks = model.model.language_model.layers, {}, []
    for index, block in enumerate(blocks):

        def before(_block, args, kwargs, index=index):
            rows[index] = (args[0] if args else kwargs["hidden_states"]).detach().clone()

        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
    last = len(blocks)
    hooks.append(blocks[-1].register_forward_hook(lambda _block, _args, out: rows.__setitem__(last, out)))
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    out = rows[last]
    rows[last] = out if isinstance(out, torch.Tensor) else out[0]
    return torch.stack([rows[index][0] for index in range(last + 1)], dim=1)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen3VL"])
def test_image_tokens_have_their_rows_in_every_layer(kind, tmp_path, monkeypatch):
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())
    model, processor = save(kind, tmp_path / "model")
    prompts = [f"see {IMAGE} this", f"a {IMAGE} and {IMAGE} " + "x" * 70, "no picture", IMAGE]
    images = [[image(1)], [image(2), image(3, 90, 30)], None, [image(4)]]
    asked = [
        {"prompt": text, "multi_modal_data": {"image": shown}} if shown else text
        for text, shown in zip(prompts, images, strict=True)
    ]
    params = SamplingParams(
        temperature=0,
        max_tokens=5,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    with LLM(
        tmp_path / "model",
        engine="vllm",
        layers="all",
        storage=tmp_path / "states",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 2},
    ) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        prefilled = {sample.index: sample for sample in llm.extract(asked)}
    model.set_attn_implementation("eager")
    for index, (output, text, shown) in enumerate(zip(outputs, prompts, images, strict=True)):
        inputs = dict(processor(text=[text], images=shown, return_tensors="pt"))
        expanded = inputs["input_ids"][0].tolist()
        assert output.prompt_token_ids == expanded
        assert prefilled[index].token_ids.tolist() == expanded
        fed = torch.tensor([[*expanded, *output.outputs[0].token_ids[:-1]]])
        if "mm_token_type_ids" in inputs:
            more = torch.zeros((1, fed.shape[1] - len(expanded)), dtype=torch.long)
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], more], dim=1)
        wanted = oracle_rows(model, {**inputs, "input_ids": fed, "attention_mask": torch.ones_like(fed)})
        loaded = load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=30)
        assert loaded["token_ids"].tolist() == fed[0].tolist()
        for rows in (loaded["hidden_states"], prefilled[index].hidden_states):
            expected = wanted[: len(rows)]
            assert float(((rows - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < TOLERANCE
