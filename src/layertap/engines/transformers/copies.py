"""Small tensors on their way to the device, without waiting for what it is busy with.

A copy from ordinary memory makes the host wait until everything that was launched before has run; so between two forwards the
device would stand still while the next one is launched.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, in the order of its current stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
