"""Finding the blocks of a model as vLLM builds it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from layertap.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks that this worker holds.

    Attributes:
        path: name of their list in the model.
        local: block index (global) to module.
    """

    path: str
    local: dict[int, nn.Module]


def find_blocks(model: nn.Module, num_layers: int, attention_names: Iterable[str]) -> Blocks:
    """Find the list of the text decoder's blocks.

    Args:
        model: the whole model.
        num_layers: how many blocks there are over all pipeline stages.
        attention_names: names of the attention (or state-space) layers that vLLM registered; they tell decoder blocks from
            the blocks of encoders.

    Raises:
        UnsupportedModelError: none or several lists could be it.
    """
    names = list(attention_names)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and any(map(_is_here, module))
    ]
    serving = [(name, module) for name, module in lists if any(other.startswith(f"{name}.") for other in names)]
    found = serving or lists
    if len(found) > 1 and hasattr(model, "get_language_model"):
        language_model: Any = model
        inside = {id(module) for module in language_model.get_language_model().modules()}
        found = [(name, module) for name, module in found if id(module) in inside] or found
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its {num_layers} blocks can't be found with certainty; lists of that length: "
            f"{[name for name, _ in found] or 'none'}"
        )
    path, blocks = found[0]
    return Blocks(path, {index: block for index, block in enumerate(blocks) if _is_here(block)})


def _is_here(block: Any) -> bool:
    return not type(block).__name__.endswith("MissingLayer")
