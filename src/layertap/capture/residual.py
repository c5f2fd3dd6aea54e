"""How blocks hand the residual stream on, and which stream is meant where a model has several.

Almost every block takes [batch, tokens, hidden] as its first argument and returns it, bare or as the first of a tuple.
Some models carry several streams side by side. Of these the one is saved that the model's own last norm would read if
the model stopped there; a model whose last norm reads all of them at once has no such stream and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from layertap.errors import UnsupportedModelError

STREAM_NAMES = ("hidden_states", "hidden_state", "hidden", "x", "activations", "inputs", "input", "inputs_embeds")
"""Names under which blocks take the stream as their first argument."""

_EARLIER_STATES = ("block_states",)
"""What blocks take beside the stream where they choose among its earlier states (attention over depth)."""

_STREAM_COUNTS = ("hc_mult", "hc_count", "num_residual_streams", "num_streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The rule that turns what enters or leaves a block into one stream [batch, tokens, hidden].

    Example:
        >>> Residual(kind="single", note="", parameter="x", hidden_size=2).stream_of(torch.zeros(1, 3, 2)).shape
        torch.Size([1, 3, 2])
    """

    kind: Literal["single", "altup", "hyper-connections"]
    note: str
    """One sentence for people, saved with the rows."""
    parameter: str
    """Name of the blocks' first argument, under which callers may also pass the stream."""
    hidden_size: int | None = None
    collapse: Callable[[torch.Tensor], torch.Tensor] | None = None

    def entering(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the stream that enters a block called with these arguments (what a forward pre-hook sees)."""
        if args:
            return self.stream_of(args[0])
        if self.parameter not in kwargs:
            raise UnsupportedModelError(f"a block was called without {self.parameter!r}; it got {sorted(kwargs)}")
        return self.stream_of(kwargs[self.parameter])

    def leaving(self, output: Any) -> torch.Tensor:
        """Return the stream that leaves a block that returned `output`: a tensor, or a tuple that starts with it."""
        return self.stream_of(output[0] if isinstance(output, tuple | list) else output)

    def stream_of(self, value: Any) -> torch.Tensor:
        """Turn a block's raw input or output into [batch, tokens, hidden]; anything else is refused with its shape."""
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModelError(
                f"a block carries a {type(value).__name__} where its residual stream was expected"
            )
        stream = value if self.collapse is None else self.collapse(value)
        if stream.ndim != 3 or self.hidden_size not in (None, stream.shape[-1]):
            raise UnsupportedModelError(
                f"a block carries a tensor of shape {tuple(value.shape)}, expected [batch, tokens, {self.hidden_size}]"
            )
        return stream


def find_residual(decoder: nn.Module, blocks: Sequence[nn.Module], config: Any, hidden_size: int | None) -> Residual:
    """Decide from structure and configuration how these blocks carry the stream; what can't be decided is refused."""
    parameter = _stream_parameter(blocks)
    _refuse_earlier_states(blocks)
    count = getattr(config, "altup_num_inputs", None)
    if isinstance(count, int) and count > 1:
        return Residual(
            kind="altup",
            note=f"AltUp keeps {count} streams; saved is their mean after the model's own unembedding projections, "
            "which its last norm would read",
            parameter=parameter,
            hidden_size=hidden_size,
            collapse=_altup_collapse(decoder, count),
        )
    for name in _STREAM_COUNTS:
        streams = getattr(config, name, None)
        if isinstance(streams, int) and streams > 1:
            path, head = _hyper_head(decoder, blocks, streams, hidden_size, name)
            return Residual(
                kind="hyper-connections",
                note=f"hyper-connections keep {streams} streams; saved is what the model's own {path!r} makes of them, "
                "which its last norm would read",
                parameter=parameter,
                hidden_size=hidden_size,
                collapse=head,
            )
    return Residual(
        kind="single", note="one residual stream, as it enters the block", parameter=parameter, hidden_size=hidden_size
    )


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a norm: a leaf whose class says so."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _stream_parameter(blocks: Sequence[nn.Module]) -> str:
    first: dict[str, str] = {}
    for block in blocks:
        names = [name for name in inspect.signature(block.forward).parameters if name != "self"]
        first.setdefault(names[0] if names else "(nothing)", type(block).__name__)
    if len(first) == 1 and next(iter(first)) in STREAM_NAMES:
        return next(iter(first))
    found = ", ".join(f"{kind} takes {name!r}" for name, kind in first.items())
    raise UnsupportedModelError(
        f"the blocks don't carry one residual stream as their first argument: {found}; expected one of {', '.join(STREAM_NAMES)}. "
        "Models whose blocks pass on two streams (reversible, two-stream attention) have no single stream to save"
    )


def _refuse_earlier_states(blocks: Sequence[nn.Module]) -> None:
    for block in blocks:
        for name in _EARLIER_STATES:
            if name in inspect.signature(block.forward).parameters:
                raise UnsupportedModelError(
                    f"the blocks ({type(block).__name__}) begin the stream anew from time to time and choose among what it was "
                    f"before ({name!r}), as the model's last norm does, so there is no single stream that its last norm would read"
                )


def _altup_collapse(decoder: nn.Module, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    projections = getattr(decoder, "altup_unembed_projections", None)
    if not isinstance(projections, nn.ModuleList) or len(projections) != count - 1:
        raise UnsupportedModelError(
            f"the configuration says altup_num_inputs={count}, but the decoder {type(decoder).__name__} has no "
            f"'altup_unembed_projections' of length {count - 1} that would make one stream of them"
        )

    def collapse(streams: torch.Tensor) -> torch.Tensor:
        if streams.ndim != 4 or streams.shape[0] != count:
            raise UnsupportedModelError(
                f"expected [{count} streams, batch, tokens, hidden], got {tuple(streams.shape)}"
            )
        active = streams[0]
        magnitude = active.pow(2).mean(dim=-1, keepdim=True).sqrt()
        smallest = torch.tensor(1e-5, device=active.device)
        parts = [active]
        for stream, projection in zip(streams[1:], projections, strict=True):
            part = projection(stream).to(active.dtype)
            size = part.pow(2).mean(dim=-1, keepdim=True).maximum(smallest).sqrt()
            parts.append(part * magnitude / size)
        return torch.stack(parts).mean(dim=0)

    return collapse


def _hyper_head(
    decoder: nn.Module, blocks: Sequence[nn.Module], streams: int, hidden_size: int | None, field: str
) -> tuple[str, nn.Module]:
    """Find the decoder's own module that makes one stream of several, and the norm behind it."""
    inside = {id(module) for block in blocks for module in block.modules()}
    direct = [(name, child) for name, child in decoder.named_children() if id(child) not in inside]
    wide = streams * (hidden_size or 0)
    heads = [
        (name, child)
        for name, child in direct
        if not isinstance(child, nn.ModuleList) and any(wide in parameter.shape for parameter in child.parameters())
    ]
    norms = [name for name, child in direct if is_norm(child)]
    if len(heads) != 1 or not norms:
        names = ", ".join(f"{name} ({type(child).__name__})" for name, child in heads) or "none"
        raise UnsupportedModelError(
            f"the model keeps {streams} residual streams ({field}), and its decoder {type(decoder).__name__} does not make one "
            f"stream of them before a last norm (collapsing modules: {names}; norms: {', '.join(norms) or 'none'}), so there is no "
            "single stream that its last norm would read"
        )
    return heads[0]
