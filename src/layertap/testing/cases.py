"""Which architectures the zoo holds, and what each needs beyond the generic shrinking.

Names only: this module imports neither torch nor transformers, so that tests can be parametrised with it at no cost. A case is
called by its `model_type`; a variant of it has a suffix (`falcon-alibi`). What the installed transformers doesn't have yet is left
out.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.version import Version

Kind = Literal["causal", "multimodal", "encoder-decoder"]

_CAUSAL = """
    cohere cohere2 gptj gpt_neox stablelm phi phi3 olmo olmo2 olmo3 gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4
    mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 llama4_text gpt_oss mistral qwen2 jamba mamba mamba2 falcon_mamba zamba
    zamba2 qwen3_next lfm2 lfm2_moe falcon_h1 gpt2 opt bloom falcon mpt granite granitemoe granitemoehybrid granitemoeshared
    minicpm3 recurrent_gemma rwkv llama qwen3
    afmoe apertus arcee aria_text axk1 axk2 bamba bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot
    blenderbot-small blt camembert codegen cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text dbrx deepseek_v32
    deepseek_v4 diffllama doge dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu
    gemma4_assistant gemma4_unified_assistant gemma4_unified_text git glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt_bigcode
    gpt_neo gpt_neox_japanese granite_swa granitemoe_swa helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
    hyperclovax inkling_text jais2 jetmoe kimi_linear laguna longcat_flash marian mbart megatron-bert mellum mimo_v2_flash
    minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mllama modernbert-decoder moshi musicgen musicgen_melody mvp
    nanochat nemotron nemotron_h olmo_hybrid olmoe openai-gpt pegasus persimmon phi4_multimodal phimoe plbart prophetnet
    qwen3_5_text qwen3_5_moe_text qwen4_exp_text reformer rembert roberta roberta-prelayernorm roc_bert roformer seed_oss
    smollm3 solar_open starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zaya
"""

_SINCE = {
    "5.20": "bailing_hybrid kolibri1",
    "5.21": "beam flint",
    "5.23": "dots3_note_text inkling2_text lfm3",
    "5.24": "apertus1p5_text dory inkling2_loop_text lara_mini",
}
"""Causal model types by the version of transformers that brought them; all others are in 5.19."""

SAME_AS = {
    "dots3_note": "multimodal; its causal class is that of dots3_note_text",
    "exaone": "runs as llama",
    "gemma3": "multimodal; its causal class is the text decoder of gemma3_text",
    "gemma4": "multimodal; its text decoder is gemma4_text",
    "gemma4_unified": "multimodal; its text decoder is gemma4_unified_text",
    "got_ocr2": "multimodal only; listed among the multimodal cases",
    "internlm3": "runs as llama",
    "iquestcoder": "runs as llama",
    "llama4": "its causal class is that of llama4_text",
    "qwen3_5": "its causal class is that of qwen3_5_text",
    "qwen3_5_moe": "its causal class is that of qwen3_5_moe_text",
    "moss_transcribe_diarize": "speech; its text decoder is qwen3",
    "qwen4_exp": "its causal class is that of qwen4_exp_text",
    "sarvam_mla": "runs as deepseek_v3",
    "sarvam_moe": "runs as glm4_moe",
}
"""Model types that map to a causal class under a second name, and where the zoo has them."""

_MULTIMODAL = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "got_ocr2": "GotOcr2ForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "aria": "AriaForConditionalGeneration",
    "aya_vision": "AyaVisionForConditionalGeneration",
    "deepseek_vl": "DeepseekVLForConditionalGeneration",
    "evolla": "EvollaForProteinText2Text",
    "idefics2": "Idefics2ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}

_ENCODER_DECODER = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "led": "LEDForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "seamless_m4t": "SeamlessM4TForTextToText",
    "t5gemma2": "T5Gemma2ForConditionalGeneration",
}

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE: dict[str, Any] = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}}

_INKLING2: dict[str, Any] = {"unpadded_vocab_size": 320, "n_layers_per_attn_res_block": 2, "log_scaling_n_floor": 8}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bert": {"is_decoder": True},
    "blt": {
        "encoder_hash_byte_group_vocab": 500,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": dict.fromkeys(_ALTERNATING, _ROPE | {"mrope_section": [3, 3, 2]}),
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 48,
    },
    "dory": {"n_input_layers": 2, "n_output_layers": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    },
    "glm4v": _MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "granitemoe": {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "residual_multiplier": 0.6},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_loop_text": _INKLING2 | {"loop_gate_rank": 16, "loop_layer_index_start": 2, "loop_layer_index_end": 4},
    "inkling2_text": _INKLING2,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _ALTERNATING},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": _ALTERNATING},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "ministral": {"head_dim": 16, "layer_types": _ALTERNATING},
    "mllama": {"cross_attention_layers": [1]},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_vl": _MROPE,
    "qwen2_5_vl": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "rwkv": {"rescale_every": 2},
    "youtu": {"tie_word_embeddings": False},  # transformers draws tied embeddings of this class anew when it loads them
    "smollm3": {"use_sliding_window": True, "sliding_window": 8, "layer_types": _ALTERNATING},
    "xlm": {"causal": True, "use_lang_emb": False},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {
        "num_hidden_layers": 7,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "num_mem_blocks": 2,
        "use_mem_rope": True,
    },
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-alibi": ("falcon", {"alibi": True, "parallel_attn": False}),
    "falcon-new-decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "llama-dynamic-ntk": (
        "llama",
        {"rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": _ROPE
            | {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "opt-post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": _ROPE
            | {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
            },
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen3-sliding": ("qwen3", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
}

_DRAFT = "a draft head and no model of its own: its forward wants the target's hidden states and key-value cache"
_CODEBOOKS = "reads several audio codebooks a step, not one token id a position"
_INSTALLED = Version(importlib.metadata.version("transformers"))
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower wants the package timm; the text decoder is the case gemma3n_text",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
}
"""Model types that the zoo can't hold, and why."""
if Version("5.24") <= _INSTALLED < Version("5.25"):
    UNBUILDABLE["llama4"] = (
        "transformers 5.24 raises an AttributeError behind the last block of the multimodal class; the text decoder is llama4_text"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One architecture of the zoo."""

    name: str
    model_type: str
    kind: Kind
    model_class: str | None = None
    """Name of the class in transformers; None means the causal class of the model type."""
    overrides: dict[str, Any] = field(default_factory=dict)
    attention: Literal["eager", "sdpa"] = "eager"
    """The attention whose result is the reference."""
    remark: str = ""
    """What is odd about the reference itself."""


_REFERENCES: dict[str, tuple[Literal["eager", "sdpa"], str]] = {
    "falcon-alibi": ("sdpa", "transformers adds ALiBi twice in eager attention: in the mask and to the scores"),
    "paligemma": ("eager", "on text alone transformers is causal in eager attention and bidirectional in SDPA"),
}


def _case(name: str, model_type: str, kind: Kind, model_class: str | None = None, **extra: Any) -> Case:
    attention, remark = _REFERENCES.get(name, ("eager", ""))
    return Case(
        name=name,
        model_type=model_type,
        kind=kind,
        model_class=model_class,
        overrides=_OVERRIDES.get(model_type, {}) | extra,
        attention=attention,
        remark=remark,
    )


NEWER: dict[str, str] = {
    name: since for since, names in _SINCE.items() if Version(since) > _INSTALLED for name in names.split()
}
"""What the installed transformers doesn't have yet, and with which version it came."""


def _cases() -> dict[str, Case]:
    since = " ".join(_SINCE.values()).split()
    names = [*_CAUSAL.split(), *(name for name in since if name not in NEWER)]
    cases = [_case(name, name, "causal") for name in names]
    cases += [_case(name, base, "causal", **extra) for name, (base, extra) in _VARIANTS.items()]
    tables: tuple[tuple[Kind, dict[str, str]], ...] = (
        ("multimodal", _MULTIMODAL),
        ("encoder-decoder", _ENCODER_DECODER),
    )
    for kind, table in tables:
        for model_type, model_class in table.items():
            name = f"{model_type}-{kind}" if model_type in _CAUSAL.split() else model_type
            cases.append(_case(name, model_type, kind, model_class))
    return {case.name: case for case in cases if case.model_type not in UNBUILDABLE}


CASES: dict[str, Case] = _cases()
"""Every architecture of the zoo by name, the awkward causal ones first."""

AWKWARD: tuple[str, ...] = tuple(CASES)[:52]
"""The cases in which something was once got wrong, or easily is: what a quick run of tests takes."""
