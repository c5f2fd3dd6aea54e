"""Watch one forward of a model whose blocks were found by structure, and refuse what structure could not show.

    notes = probe(blocks, lambda: model(input_ids=ids, use_cache=False), num_tokens=ids.shape[1])

Some models read prompts of their own beside the tokens, carry one stream per predicted n-gram, or run a stack several
times: their streams have no row for each token. Others are fine but not plain: blocks that don't run on text, streams
that are changed between two blocks. These are the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from layertap.capture.blocks import Blocks
from layertap.errors import UnsupportedModelError


def probe(blocks: Blocks, run: Callable[[], object], num_tokens: int) -> list[str]:
    """Run one forward of one sequence of `num_tokens` tokens; return notes, or raise UnsupportedModelError.

    Example:
        >>> from layertap.capture.blocks import find_blocks
        >>> from layertap.testing import zoo
        >>> model = zoo.build("llama")
        >>> probe(find_blocks(model), lambda: model(torch.tensor([[9, 10, 11]])), 3)
        []
    """
    entered: list[int] = []
    streams: dict[int, torch.Tensor] = {}
    left: dict[int, torch.Tensor] = {}

    def before(index: int, _block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        entered.append(index)
        streams[index] = blocks.entering(args, kwargs).detach().clone()

    def after(index: int, _block: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        left[index] = blocks.leaving(output).detach().clone()

    with ExitStack() as hooks, torch.no_grad():
        for index, block in enumerate(blocks.blocks):
            hooks.callback(block.register_forward_pre_hook(partial(before, index), with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(partial(after, index)).remove)
        run()
    where = f"blocks at {blocks.container_path}"
    if not entered or entered != sorted(set(entered)):
        order = entered if len(entered) < 20 else f"{entered[:20]}..."
        raise UnsupportedModelError(f"the {where} don't run once each and in order: {order}")
    for index, stream in streams.items():
        if tuple(stream.shape[:2]) != (1, num_tokens):
            raise UnsupportedModelError(
                f"block {index} of the {where} carries {tuple(stream.shape[:2])} rows for 1 sequence of {num_tokens} tokens: "
                "its stream has no row for each token"
            )
    return _notes(blocks, streams, left)


def _notes(blocks: Blocks, streams: Mapping[int, torch.Tensor], left: Mapping[int, torch.Tensor]) -> list[str]:
    skipped = [index for index in range(blocks.num_layers) if index not in streams]
    notes = [f"block {index} does not run on text alone: its layer is what enters the next block" for index in skipped]
    order = sorted(streams)
    changed = [b for a, b in pairwise(order) if not torch.equal(left[a], streams[b])]
    if changed:
        notes.append(
            f"the stream is changed between blocks: what enters {changed} is not what the block before put out"
        )
    return notes
