"""The oracle: hidden states from plain transformers, which every engine of layertap has to match.

One prompt at a time, float32, eager attention, no cache, hooks on the blocks. It shares nothing with the engines but the
search for the list of blocks. In a model with several residual streams it doesn't trust our own rule for making one of
them: it truncates the model to L blocks and takes what the model's last norm then reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layertap.capture.blocks import Blocks, find_blocks
from layertap.testing.zoo import decoder_inputs


def hidden_states(
    model: Any, token_ids: Sequence[int], layers: Sequence[int] | None = None, attention: str = "eager"
) -> torch.Tensor:
    """Return the streams [tokens, layers, hidden] of one prompt; `layers` None means all, 0 to num_layers.

    Layer L is what enters block L; the last is what the last block puts out, before the final norm. A block that the
    model doesn't run on this input (cross attention without an image) is entered by what enters the next one.
    `attention` is eager but for the few cases of the zoo whose eager attention is not the reference
    (`zoo.case(name).attention`).

    Example:
        >>> from layertap.testing import zoo
        >>> hidden_states(zoo.build("llama"), [9, 10, 11]).shape
        torch.Size([3, 5, 64])
    """
    floats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if floats != {torch.float32} or model.training:
        raise ValueError(f"the oracle wants a float32 model in eval mode, got {floats}, training={model.training}")
    blocks = find_blocks(model)
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad(), with_attention(model, attention):
        rows = _at_blocks(model, blocks, ids)
        if rows[0].ndim != 3 or rows[0].shape[-1] != blocks.hidden_size:
            rows = [_at_last_norm(model, blocks, ids, depth) for depth in range(blocks.num_layers + 1)]
    for depth, row in enumerate(rows):
        if row.shape != (1, len(token_ids), blocks.hidden_size):
            raise ValueError(f"layer {depth}: the stream has shape {tuple(row.shape)} for {len(token_ids)} tokens")
    wanted = range(blocks.num_layers + 1) if layers is None else layers
    return torch.stack([rows[layer][0] for layer in wanted], dim=1)


@contextmanager
def with_attention(model: Any, attention: str) -> Iterator[None]:
    """Run with this attention implementation in every part of the model, and put back what was set."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = {key: getattr(config, "_attn_implementation", None) for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = attention
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def eager_attention(model: Any) -> AbstractContextManager[None]:
    """Run with eager attention in every part of the model, and put back what was set."""
    return with_attention(model, "eager")


def _run(model: Any, ids: torch.Tensor) -> None:
    model(**decoder_inputs(model, ids), use_cache=False)


def _at_blocks(model: Any, blocks: Blocks, ids: torch.Tensor) -> list[torch.Tensor]:
    """What enters each block and what leaves the last one that runs, as plain hooks see it."""
    entering: dict[int, torch.Tensor] = {}
    leaving: dict[int, torch.Tensor] = {}

    def before(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index in entering:
            raise ValueError(f"block {index} ran twice in one forward")
        stream = args[0] if args else kwargs["hidden_states"]
        entering[index] = stream.detach().clone()

    def after(index: int, output: Any) -> None:
        leaving[index] = (output if isinstance(output, torch.Tensor) else output[0]).detach().clone()

    with ExitStack() as hooks:
        for index, block in enumerate(blocks.blocks):
            pre = block.register_forward_pre_hook(
                lambda _module, args, kwargs, index=index: before(index, args, kwargs), with_kwargs=True
            )
            post = block.register_forward_hook(lambda _module, _args, output, index=index: after(index, output))
            hooks.callback(pre.remove)
            hooks.callback(post.remove)
        _run(model, ids)
    rows = [leaving[max(leaving)]]
    for index in reversed(range(blocks.num_layers)):
        rows.insert(0, entering.get(index, rows[0]))
    return rows


def _at_last_norm(model: Any, blocks: Blocks, ids: torch.Tensor, depth: int) -> torch.Tensor:
    """What the decoder's last norm (the last that runs) reads when the model stops after `depth` blocks."""
    inner = {id(module) for block in blocks.blocks for module in block.modules()}
    norms = [child for child in blocks.decoder.children() if id(child) not in inner and "Norm" in type(child).__name__]
    read: list[torch.Tensor] = []
    name = blocks.container_path.rpartition(".")[2]
    whole = getattr(blocks.decoder, name)
    hooks = [
        norm.register_forward_pre_hook(lambda _norm, args: read.append(args[0].detach().clone())) for norm in norms
    ]
    try:
        setattr(blocks.decoder, name, nn.ModuleList(blocks.blocks[:depth]))
        _run(model, ids)
    finally:
        setattr(blocks.decoder, name, whole)
        for hook in hooks:
            hook.remove()
    return read[-1]
