"""Random weights without a checkpoint, for measurements: vLLM's `load_format="dummy"`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layertap.engines.transformers.load import ModelSource

__all__ = ["random_model"]


def random_model(
    source: ModelSource, cls: type[PreTrainedModel], decoder: str, blocks: dict[int, str]
) -> PreTrainedModel:
    """Build a model, or the part of it that `cls` builds, with the weights that training would begin with.

    Each block has weights of its own, which don't depend on what is built beside it.

    Args:
        source: configuration, dtype and device.
        cls: the class to build; what it leaves out costs no memory.
        decoder: path of the module that runs the blocks.
        blocks: paths of the blocks that are built, by their number.
    """
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(source.config), dtype=source.dtype)
    model.to_empty(device=source.device)
    owner: Any = model.get_submodule(decoder)
    owner = owner if hasattr(owner, "_initialize_weights") else model
    with torch.no_grad(), torch.random.fork_rng([source.device] if source.device.type == "cuda" else []):
        for index, name in blocks.items():
            torch.manual_seed(1 + index)
            model.get_submodule(name).apply(owner._initialize_weights)
        torch.manual_seed(0)
        model.initialize_weights()
    model.tie_weights(recompute_mapping=False)
    return model
