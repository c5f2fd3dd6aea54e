"""Random weights under which every layer does something that can be measured.

The usual initialisation (0.02, zero biases, unit norms) gives a residual stream that hardly changes and attention that is
flat, so a wrong mask or a row of the wrong layer would pass unseen. Here a matrix keeps the variance of its input,
queries and keys a little more, norms and biases are uneven. Parameters with a meaning of their own (decay rates, time
steps, gates) keep the values that transformers gives them.
"""

from __future__ import annotations

import math

import torch
from torch import nn

GAIN = 1.0
QUERY_KEY_GAIN = 1.5
_QUERY_KEY = ("q_proj", "k_proj", "query", "key", "qkv", "c_attn", "q_b_proj", "wqkv", "in_proj_qkv", "query_key_value")
_OWN_MEANING = (
    "A_log",
    "dt_bias",
    "time_",
    "decay",
    "lambda",
    "igate",
    "fgate",
    "altup",
    "correction_bias",
    "rg_lru",
    ".hc_",
)


def _normal(parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _fan_in(module: nn.Module, name: str, parameter: nn.Parameter) -> int:
    if type(module).__name__ == "Conv1D":  # transformers' own: [in, out]
        return parameter.shape[0]
    if (
        parameter.ndim == 3 and "Conv" not in type(module).__name__
    ):  # [expert, a, b]: which of the two is the input differs
        return max(parameter.shape[1:])
    return math.prod(parameter.shape[1:])


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Fill the model's weights in place, the same for the same seed, and check that none is left undefined."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            _fill(module, f"{path}.{name}", name, parameter, generator)
            if not torch.isfinite(parameter).all():
                _normal(parameter, 0.1, generator)


def _fill(module: nn.Module, path: str, name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    kind = type(module).__name__
    if not parameter.requires_grad or any(word in path for word in _OWN_MEANING) or name in ("D", "dt_proj_bias"):
        return
    if isinstance(module, nn.Embedding) or "sink" in name:
        _normal(parameter, 1.0, generator)
    elif parameter.ndim >= 2:
        gain = QUERY_KEY_GAIN if path.rsplit(".", 2)[-2] in _QUERY_KEY else GAIN
        _normal(parameter, gain / math.sqrt(_fan_in(module, name, parameter)), generator)
    elif parameter.ndim == 1 and ("norm" in kind.lower() or name == "bias"):
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
