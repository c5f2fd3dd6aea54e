"""Attention of batched generation on CUDA: transformers' paged cache, and one fused kernel over all sequences of a step.

transformers' own choice without a FlashAttention package is torch's attention with a mask of every query against every key of
the batch. Here the cache hands over the keys and values of the sequences end to end, and the kernel is told where each begins.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from layertap.engines.transformers.attention import NotPackable, one_by_one
from layertap.engines.transformers.varlen import varlen, varlen_fits

__all__ = ["PAGED", "register_paged"]

PAGED = "layertap_paged"
"""Name under which transformers finds this attention. Without a mask function, so that no mask is built."""


def register_paged() -> None:
    """Make it known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, size] in, [1, T, heads, size] out."""
    if attention_mask is not None or softcap or s_aux is not None:
        raise NotPackable(
            "the model gives its attention a mask, a soft cap or sinks, which the fused kernel doesn't take"
        )
    if others.get("block_table") is not None:
        raise NotPackable("transformers leaves the cache to a kernel of its own")
    window = int(sliding_window or 0)
    key, value, cu_seqlens_k, longest_k = _through_cache(module, key, value, window, others)
    cu_seqlens = others["cu_seq_lens_q"].to(torch.int32)
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    if query.device.type == "cuda":
        if not varlen_fits(query, key, value):
            raise NotPackable(
                f"the fused kernel doesn't take {query.dtype} heads of {query.shape[-1]} and {value.shape[-1]}"
            )
        longest = int(others["max_length_q"] if "max_length_q" in others else others["max_seqlen_q"])
        output = varlen(
            query, key, value, cu_seqlens, longest, scale, window, cu_seqlens_k=cu_seqlens_k, longest_k=longest_k
        )
        return output, None
    bounds, seen = cu_seqlens.tolist(), cu_seqlens_k.tolist()
    return one_by_one(query, key, value, bounds, seen, None, scale, window, 0.0), None


def _through_cache(
    module: nn.Module, key: Tensor, value: Tensor, window: int, others: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Store the new keys and values; all of the step's sequences, where each begins, and the length of the longest."""
    cache = others.get("cache")
    if cache is None:  # from 5.24 on, the model's own attention has stored them, with this layer's bounds in `others`
        if not isinstance(others.get("cu_seq_lens_k"), Tensor):
            raise NotPackable("the model's attention doesn't go through the cache of batched generation")
        return key, value, others["cu_seq_lens_k"], int(others["max_length_k"])
    if _cache_fills_in():
        key, value = cache.update(key, value, module.layer_idx, others)  # puts this layer's bounds into `others`
        return key, value, others["cu_seq_lens_k"], int(others["max_length_k"])
    # before 5.18
    kind = "sliding_attention" if window else "full_attention"
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=others["read_index"],
        write_index=others["write_index"],
    )
    bounds, longest = others["cu_seq_lens_k"], others["max_seqlen_k"]
    if isinstance(bounds, dict):
        bounds, longest = bounds[kind], longest[kind]
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in (key, value))
    return key, value, bounds.to(torch.int32), int(longest)


@lru_cache(maxsize=1)
def _cache_fills_in() -> bool:
    """Whether the cache puts a layer's bounds into the attention's arguments itself: from 5.18 on."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    return "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
