"""Fused variable-length attention on CUDA: FlashAttention 3 where vLLM is installed on a Hopper card, else torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["varlen", "varlen_fits"]


def varlen_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel takes these shapes and this dtype."""
    size = query.shape[-1]
    same_size = size == key.shape[-1] == value.shape[-1] and size <= 256 and size % 8 == 0
    half = query.dtype in (torch.float16, torch.bfloat16)
    return same_size and half and "window_size" in _torch_parameters()


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    longest_k: int | None = None,
) -> Tensor:
    """Causal attention within each sequence of a packed row; the queries of a sequence are its last tokens.

    Args:
        query: [1, heads, T, size]; `key` and `value` may have fewer heads.
        key: see `query`.
        value: see `query`.
        cu_seqlens: int32 [sequences + 1], 0 and the end of each sequence.
        longest: length of the longest sequence.
        scale: factor of the logits.
        window: how many keys, its own among them, a token sees; 0 for all.
        cu_seqlens_k: `cu_seqlens` of the keys, where there are more of them than queries.
        longest_k: of the keys.

    Returns:
        [1, T, heads, size]
    """
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    longest_k = longest if longest_k is None else longest_k
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = (window - 1 if window else -1, 0)
    flash3 = _flash_attention_3(query.device)
    if flash3 is not None:
        return flash3(
            q,
            k,
            v,
            max_seqlen_q=longest,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_k=longest_k,
            cu_seqlens_k=cu_seqlens_k,
            softmax_scale=scale,
            causal=True,
            window_size=list(bounds),
            fa_version=3,
        ).unsqueeze(0)
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": bounds}
    if q.shape[1] != k.shape[1] and "enable_gqa" in _torch_parameters():
        options["enable_gqa"] = True  # older ones (torch 2.11) take fewer key heads unasked
    output = varlen_attn(q, k, v, cu_seqlens, cu_seqlens_k, longest, longest_k, **options)
    assert isinstance(output, Tensor)  # no log-sum-exp was asked for
    return output.unsqueeze(0)


@lru_cache(maxsize=8)
def _flash_attention_3(device: torch.device) -> Callable[..., Tensor] | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE
    except ImportError:
        return None
    return flash_attn_varlen_func if FA3_AVAILABLE else None


@lru_cache(maxsize=1)
def _torch_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
