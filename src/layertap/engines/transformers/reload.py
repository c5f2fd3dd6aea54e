"""New weights into a loaded model, in place: for training loops that go on serving."""

from pathlib import Path

import torch

from layertap.engines.transformers.load import open_model
from layertap.engines.transformers.weights import Weights
from layertap.errors import ModelError

__all__ = ["reload_weights"]


def reload_weights(weights: Weights, folder: str | Path) -> int:
    """Copy the weights of a checkpoint over those of the loaded model. Nothing may run meanwhile.

    The checkpoint is loaded beside the model first, so a broken one changes nothing; that takes the model's memory once more.

    Args:
        weights: of the running model.
        folder: a checkpoint of the same architecture and sizes.

    Returns:
        How many tensors were replaced.

    Raises:
        ModelError: it can't be loaded, or isn't of the same model.
    """
    source = weights.source
    fresh_source = open_model(str(folder), dtype=source.dtype, device=source.device)
    fresh = Weights(fresh_source)
    if fresh.num_layers != weights.num_layers:
        raise ModelError(f"{folder}: {fresh.num_layers} blocks, the running model has {weights.num_layers}")
    model = weights.at_least(weights.num_layers, complete=True)
    ours, theirs = model.state_dict(), fresh.at_least(fresh.num_layers, complete=True).state_dict()
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise ModelError(
            f"{folder}: another model than the running one: {len(odd)} tensors differ, the first is {odd[0]!r}"
        )
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            raise ModelError(
                f"{folder}: {name} is {tuple(theirs[name].shape)}, the running model's {tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
    return len(ours)
