"""Attention over sequences packed end to end, and the private view of a model that uses it.

Packed, a batch is one row [1, T] of sequences that must not see one another. transformers asks its `AttentionInterface` for
the function named in the configuration; ours is `layertap_packed`. It has no mask function on purpose: transformers then
builds no mask at all, and ours cuts the row at the bounds of the `Pack` that is current in this thread. Windows, soft caps,
sinks, grouped heads and other head sizes of the values are honoured; anything else that a model hands over (position biases,
masks of its own, cross attention) raises `NotPackable`, and the self-test then sends the model the padded way.

`private_view` copies the modules and configurations of a model but none of its weights, so that switching the attention
can't touch a generation that runs on the same weights.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from layertap.capture.spans import Spans
from layertap.engines.transformers.copies import to_device
from layertap.engines.transformers.varlen import varlen, varlen_fits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = [
    "IMPLEMENTATION",
    "NotPackable",
    "Pack",
    "configurations",
    "length_dependent",
    "one_by_one",
    "packed",
    "private_view",
    "register",
]

IMPLEMENTATION = "layertap_packed"
"""Name under which transformers finds our attention."""

_QUERY_CHUNK = 512
_HARMLESS_TENSORS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "input_ids", "token_type_ids"}
_REFUSED = ("position_bias", "indices", "block_indices", "alibi", "attention_bias")

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NotPackable(RuntimeError):
    """The model asks its attention for something that packed attention can't give."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Where the sequences of a packed row begin and end.

    Attributes:
        bounds: 0, and the end of each sequence.
        longest: length of the longest sequence.
        cu_seqlens: `bounds` on the device, for the variable-length kernel; None on the CPU.
        keys: for sequences that share their beginnings: the rows that each one sees, its own last, end to end, on the device. None:
            each sees only its own.
        seen: the bounds of the sequences in `keys`, as a pack.
    """

    bounds: tuple[int, ...]
    longest: int
    cu_seqlens: Tensor | None
    keys: Tensor | None = None
    seen: Pack | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, rows: Sequence[Spans] | None = None) -> Pack:
        """Describe sequences of these lengths, end to end; `rows` are those of the pack that each one sees, where they share."""
        bounds = (0, *accumulate(lengths))
        on_device = to_device(torch.tensor(bounds, dtype=torch.int32), device) if device.type == "cuda" else None
        pack = cls(bounds, max(lengths), on_device)
        if rows is None:
            return pack
        keys = to_device(torch.cat([torch.arange(*span) for spans in rows for span in spans]), device)
        seen = cls.of([sum(stop - start for start, stop in spans) for spans in rows], device)
        return replace(pack, keys=keys, seen=seen)


_current = threading.local()


@contextmanager
def packed(pack: Pack) -> Iterator[None]:
    """Cut packed rows at the bounds of `pack` while this thread runs a forward."""
    _current.pack = pack
    try:
        yield
    finally:
        _current.pack = None


def register() -> None:
    """Make our attention known to transformers. Idempotent; no model uses it unless its configuration says so."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct configuration that a module of the model looks at, sub-configurations too."""
    from transformers import PreTrainedConfig

    found: dict[int, PreTrainedConfig] = {}
    waiting = [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, PreTrainedConfig)
    ]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return list(found.values())


def private_view(model: ModuleT, implementation: str | None = None) -> ModuleT:
    """Copy a model's modules and configurations, sharing every parameter and buffer; no hooks come along.

    A rotary table that depends on the length is the view's own: from transformers 5.23 on, each forward overwrites it in place, and
    another view may be running at that moment.

    Args:
        model: the model, which stays as it is.
        implementation: the attention that the view uses; the model's own if None.
    """
    shared = chain(model.parameters(), model.buffers(), _kept_apart(model))
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    for module in filter(length_dependent, model.modules()):
        for buffer in module.buffers(recurse=False):
            memo.pop(id(buffer), None)
    # Empty already in the copy: a hook may be a method of something that must not be copied along.
    hooks = (table for module in model.modules() for table in (module._forward_hooks, module._forward_pre_hooks))
    memo |= {id(table): type(table)() for table in hooks}
    view = copy.deepcopy(model, memo)
    if implementation is not None:
        for config in configurations(view):
            config._attn_implementation = implementation
    return view


def length_dependent(module: nn.Module) -> bool:
    """Whether transformers changes this rotary module's table with the length (the test is that of its own decorator)."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _kept_apart(model: nn.Module) -> Iterator[Tensor]:
    """Weights that are no parameters any more once the model has run: bitsandbytes moves them to the layers' `state`."""
    for module in model.modules():
        state = getattr(module, "state", None)
        if hasattr(state, "__dict__"):
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))


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
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, size] in, [1, T, heads, size] out."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_unknown(attention_mask, causal, others)
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotPackable(f"attention of {tuple(query.shape)} queries over {tuple(key.shape)} keys isn't a packed row")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    function = packed_attention_op if torch.compiler.is_compiling() else packed_attention
    return function(query, key, value, s_aux, scale, int(sliding_window or 0), float(softcap or 0.0)), None


def _refuse_unknown(attention_mask: Tensor | None, causal: bool, others: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise NotPackable("the model builds an attention mask of its own")
    if not causal:
        raise NotPackable("the model's attention isn't causal")
    for name, given in others.items():
        if given is not None and (name in _REFUSED or (isinstance(given, Tensor) and name not in _HARMLESS_TENSORS)):
            raise NotPackable(f"the model gives its attention {name!r}")


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> Tensor:
    """Causal attention within each sequence of the current pack.

    Args:
        query: [1, heads, T, size]; `key` and `value` may have fewer heads, and the values another size.
        key: see `query`.
        value: see `query`.
        sinks: one logit a head that takes part in the softmax and adds nothing; None for none.
        scale: factor of the logits.
        window: how many keys, its own among them, a token sees; 0 for all.
        softcap: logits become softcap * tanh(logits / softcap); 0 for no cap.

    Returns:
        [1, T, heads, size of the values]
    """
    pack: Pack | None = getattr(_current, "pack", None)
    if pack is None or pack.bounds[-1] != query.shape[2]:
        raise NotPackable(f"a row of {query.shape[2]} tokens was run without a pack that describes it")
    seen = pack
    if pack.keys is not None and pack.seen is not None:
        key, value, seen = key[:, :, pack.keys], value[:, :, pack.keys], pack.seen
    if pack.cu_seqlens is not None and sinks is None and not softcap and varlen_fits(query, key, value):
        own, longest = pack.cu_seqlens, pack.longest
        return varlen(
            query, key, value, own, longest, scale, window, cu_seqlens_k=seen.cu_seqlens, longest_k=seen.longest
        )
    return one_by_one(query, key, value, pack.bounds, seen.bounds, sinks, scale, window, softcap)


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Sequence[int],
    seen: Sequence[int],
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention within each sequence, without a fused kernel; the queries of a sequence are its last tokens.

    Args:
        query: [1, heads, T, size]
        key: [1, heads, S, size], maybe fewer heads.
        value: as `key`.
        bounds: 0, and the end of each sequence's queries.
        seen: the same of its keys.
        sinks: see `packed_attention`.
        scale: factor of the logits.
        window: see `packed_attention`.
        softcap: see `packed_attention`.

    Returns:
        [1, T, heads, size of the values]
    """
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    by_hand = sinks is not None or softcap > 0
    for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(seen), strict=True):
        q, k, v, out = query[:, :, begin:end], key[:, :, first:last], value[:, :, first:last], output[:, begin:end]
        if by_hand:
            _by_hand(q, k, v, out, sinks, scale, window, softcap)
        elif last - first > end - begin or (window and end - begin > window):
            _windowed(q, k, v, out, scale, window)
        else:
            out.copy_(_sdpa(q, k, v, scale, None).transpose(1, 2))
    return output


@torch.library.custom_op("layertap::packed_attention", mutates_args=())
def packed_attention_op(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> Tensor:
    """`packed_attention` as one opaque operator: torch.compile traces past it and the bounds stay out of the graph."""
    return packed_attention(query, key, value, sinks, scale, window, softcap)


@packed_attention_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _windowed(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, window: int) -> None:
    """Query chunk by query chunk, each over the keys that one of its tokens can see: linear in the length.

    The queries are those of the last keys.
    """
    length, chunk = q.shape[2], max(window, _QUERY_CHUNK)
    before = k.shape[2] - length
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        first, last = max(0, before + begin - window + 1) if window else 0, before + end
        mask = _visible(before + begin, last, first, window, q.device)
        part = _sdpa(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], scale, mask)
        out[:, begin:end].copy_(part.transpose(1, 2))


def _visible(begin: int, end: int, first: int, window: int, device: torch.device) -> Tensor:
    """Which of the keys first .. end - 1 the queries begin .. end - 1 see."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)[None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> None:
    """Soft caps and sinks, for which there is no fused kernel: logits of one chunk of queries at a time, softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    before = k.shape[2] - q.shape[2]
    for begin in range(0, q.shape[2], _QUERY_CHUNK):
        end = min(begin + _QUERY_CHUNK, q.shape[2])
        first, last = max(0, before + begin - window + 1) if window else 0, before + end
        logits = (q[:, :, begin:end] @ k[:, :, first:last].transpose(2, 3)) * scale
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits.float().masked_fill(~_visible(before + begin, last, first, window, q.device), float("-inf"))
        if sinks is None:
            weights = torch.softmax(logits, -1)
        else:
            sink = sinks.float().reshape(1, -1, 1, 1).expand(1, q.shape[1], end - begin, 1)
            weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
        out[:, begin:end].copy_((weights.to(v.dtype) @ v[:, :, first:last]).transpose(1, 2))
