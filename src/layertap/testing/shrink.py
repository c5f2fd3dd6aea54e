"""Make any transformers configuration tiny, by the names of its fields and not by a table of models.

`shrink(SomeConfig)` starts from the class's own defaults, so a family keeps what makes it special (sliding windows, shared
key-value heads, groups of experts, odd head sizes), and replaces sizes only. Windows and chunks become so small that
they really cut attention at lengths of 20 to 40 tokens, and there are as many layers as it takes for each kind of layer to occur.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HIDDEN = 64
HEADS = 4
VOCAB = 320
POSITIONS = 256
WINDOW = 8
LAYERS = 4
MAX_LAYERS = 8

_FIXED: tuple[tuple[int, str], ...] = (
    (
        HIDDEN,
        """hidden_size d_model n_embd n_embed word_embed_proj_dim embedding_size emb_dim embedding_dim input_embedding_size
        output_embedding_size lru_width projection_dim embed_dim out_hidden_size mamba_d_ssm
        backbone_hidden_size projector_input_dim projector_output_dim vision_output_dim""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads swa_num_attention_heads
        linear_num_heads""",
    ),
    (
        VOCAB,
        """vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size
        audio_vocab_size""",
    ),
    (
        POSITIONS,
        """max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions
        max_source_positions model_max_length""",
    ),
    (
        WINDOW,
        """sliding_window window_size attention_window_size attention_chunk_size local_attention keep_window_size
        sliding_window_size rel_extent index_topk mamba_chunk_size chunk_size floor_scale""",
    ),
    (
        96,
        """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff dff d_inner n_inner
        feed_forward_size d_ff mlp_hidden_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size
        shared_expert_intermediate_size moe_shared_expert_intermediate_size""",
    ),
    (48, "moe_intermediate_size expert_ffn_hidden_size"),
    (32, "q_lora_rank o_lora_rank index_head_dim linear_head_dim"),
    (
        16,
        """kv_lora_rank qk_nope_head_dim v_head_dim d_kv linear_key_head_dim linear_value_head_dim d_head mamba_d_head
        mamba_head_dim dim_head attention_head_size kv_channels num_mel_bins laurel_rank hidden_size_per_layer_input
        swa_head_dim d_rel gated_norm_rank query_pre_attn_scalar""",
    ),
    (
        8,
        """qk_rope_head_dim mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank mamba_n_heads
        mamba_num_heads rotary_dim hc_lowrank""",
    ),
    (2, "index_n_heads linear_num_key_heads swa_num_key_value_heads n_langs"),
)
_SIZES = {name: size for size, names in _FIXED for name in names.split()}

_AT_MOST: dict[int, str] = {
    8: "num_experts num_local_experts n_routed_experts moe_num_experts",
    4: "num_kv_shared_layers zero_expert_num",
    2: """num_experts_per_tok num_experts_per_token moe_topk moe_k n_group n_shared_experts num_shared_experts
        moe_num_shared_experts n_groups mamba_n_groups num_expert_group encoder_layers num_encoder_layers o_groups
        depth""",
    1: "topk_group first_k_dense_replace num_dense_layers moe_layer_start_index",
}
_CAPS = {name: cap for cap, names in _AT_MOST.items() for name in names.split()}

_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
_LAYER_KINDS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "no_rope_layers",
    "block_types",
    "attention_layers",
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_NO_DROPOUT = ("dropout", "_pdrop", "layerdrop", "dropout_prob", "jitter_noise")


def layers_for_every_kind(values: Mapping[str, Any]) -> int:
    """Count the layers it takes until each kind of layer that the defaults have has occurred (4 to 8)."""
    need = LAYERS
    for name in _LAYER_KINDS:
        kinds = values.get(name)
        if isinstance(kinds, list | tuple) and kinds:
            seen = [str(kind) for kind in kinds]
            need = max(need, max(seen.index(kind) for kind in set(seen)) + 1)
    return min(need, MAX_LAYERS)


def shrink_rope(rope: Any, head_dim: int) -> Any:
    """Scale the trained length of a rotary table down, so that prompts of 20 to 40 tokens pass it."""
    if not isinstance(rope, dict):
        return rope
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: shrink_rope(value, head_dim) for key, value in rope.items()}
    small = dict(rope)
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = 16
    if "mrope_section" in small:
        half = int(head_dim * small.get("partial_rotary_factor", 1.0)) // 2
        small["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return small


def shrunk_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration (given as a dict of its defaults) that change, with their small values."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in _SPECIAL_IDS:
            small[name] = _SPECIAL_IDS[name]
        elif name == "is_decoder":
            small[name] = True
        elif name == "attn_logit_softcapping" and value:
            small[name] = 2.0  # the usual 50 never bites on tiny models
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = 3
        elif isinstance(value, bool) or value is None:
            continue
        elif name.endswith(_NO_DROPOUT) and isinstance(value, int | float):
            small[name] = 0.0
        elif name in _LAYER_COUNTS:
            small[name] = layers_for_every_kind(values)
        elif name in _SIZES and isinstance(value, int):
            small[name] = _SIZES[name]
        elif name in _CAPS and isinstance(value, int):
            small[name] = min(value, _CAPS[name])
    _shrink_heads(values, small)
    return small


def _shrink_heads(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    heads = next(
        (values[n] for n in ("num_attention_heads", "n_head", "n_heads") if isinstance(values.get(n), int)), None
    )
    for name in _KEY_VALUE_HEADS:
        if isinstance(values.get(name), int) and heads:
            small[name] = HEADS if values[name] == heads else 1 if values[name] == 1 else HEADS // 2
    head_dim = values.get("head_dim")
    if isinstance(head_dim, int) and isinstance(values.get("hidden_size"), int) and heads:
        small["head_dim"] = HIDDEN // HEADS * (1 if head_dim * heads == values["hidden_size"] else 2)
    if isinstance(values.get("global_head_dim"), int):
        small["global_head_dim"] = small.get("head_dim", HIDDEN // HEADS) * 2
    if isinstance(values.get("rope_parameters"), dict):
        small["rope_parameters"] = shrink_rope(values["rope_parameters"], small.get("head_dim", HIDDEN // HEADS))


def shrink(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Build a tiny configuration of this class; `overrides` wins, and a dict in it goes into the sub-configuration of its name.

    Example:
        >>> from transformers import LlamaConfig
        >>> shrink(LlamaConfig, {"num_hidden_layers": 3}).num_hidden_layers
        3
    """
    wanted = dict(overrides or {})
    defaults = _defaults(config_class)
    subs = {name: getattr(defaults, name, None) for name in getattr(config_class, "sub_configs", {})}
    values = {name: value for name, value in defaults.to_dict().items() if name not in subs}
    accepted = _accepted(config_class)
    fields = {name: value for name, value in shrunk_fields(values).items() if accepted(name)}
    for name, sub in subs.items():
        if sub is not None:
            fields[name] = shrink(type(sub), wanted.pop(name, None))
    fields.update(wanted)
    return config_class(**fields)


def _defaults(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    return config_class()


def _accepted(config_class: type[PreTrainedConfig]) -> Callable[[str], bool]:
    parameters = inspect.signature(config_class.__init__).parameters
    alias_map = getattr(config_class, "attribute_map", {}) or {}
    aliases = {*alias_map, *alias_map.values()}
    derived = {"qk_head_dim", "head_dim"} - set(parameters)
    return lambda name: name not in derived and (name in parameters or name in aliases or name in _SPECIAL_IDS)
