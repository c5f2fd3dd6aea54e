"""What saving rows in a narrower dtype does to them, measured on a model's own rows."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layertap.engines.fp8 import dequantize, is_quantized, put, storage

if TYPE_CHECKING:
    import torch

    from layertap.llm import LLM
    from layertap.prompts import Prompt

_MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Of the rows of one layer: length of the difference over length of the row."""

    layer: int
    mean: float
    worst: float


def rounding_errors(
    llm: "LLM", prompts: Iterable["Prompt"], layers: tuple[int, ...], dtype: str
) -> list[RoundingError]:
    """Measure what saving in `dtype` would change, on up to 8,192 tokens of some prompts.

    Args:
        llm: the model.
        prompts: where the rows come from.
        layers: which.
        dtype: a save_dtype.
    """
    import torch

    found: list[torch.Tensor] = []
    tokens = 0
    for sample in llm.extract(itertools.islice(prompts, 64), layers=layers, save_dtype=llm.info.dtype):
        found.append(row_errors(sample.hidden_states, dtype))
        tokens += len(found[-1])
        if tokens >= _MOST_TOKENS:
            break
    errors = torch.cat(found)
    return [
        RoundingError(layer, float(errors[:, slot].mean()), float(errors[:, slot].max()))
        for slot, layer in enumerate(layers)
    ]


def row_errors(rows: "torch.Tensor", dtype: str) -> "torch.Tensor":
    """Relative error [tokens, layers] of rows [tokens, layers, hidden] that are saved in `dtype`."""
    import torch

    num_rows, num_layers, hidden_size = rows.shape
    kind, width = storage(dtype, hidden_size)
    saved = torch.empty(num_rows * num_layers, width, dtype=kind)
    put(saved, rows.flatten(0, 1))
    read = dequantize(saved) if is_quantized(saved) else saved.float()
    exact = rows.flatten(0, 1).float()
    errors: torch.Tensor = (read - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return errors.view(num_rows, num_layers)
