"""What a trial runs a model on: private views, with the model's own thresholds brought within reach of short prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from layertap.capture.blocks import Blocks, find_blocks
from layertap.engines.transformers.attention import configurations, private_view
from layertap.engines.transformers.internals import set_attention
from layertap.engines.transformers.paged import PAGED

__all__ = ["Bench"]

_WINDOW = 8
_ROTARY_SWITCH = 12
_WINDOW_NAMES = ("window", "attention_chunk", "chunk_attention", "local_attention")
_ROTARY_SWITCH_NAME = "original_max_position_embeddings"
_MOST_IDS = 50_000


@dataclass(frozen=True, slots=True)
class Bench:
    """A model to be tried or run; the original is never touched, everything runs on views of it.

    Attributes:
        model: the model.
        num_layers: blocks of its decoder.
        hidden_size: width of the stream.
        vocab_size: ids are below it.
        near_thresholds: views have windows of a few tokens, and rotary scaling that switches after a few more: what only long
            sequences would show, short ones show too.
    """

    model: nn.Module
    num_layers: int
    hidden_size: int
    vocab_size: int
    near_thresholds: bool = False

    def with_near_thresholds(self) -> Bench:
        """The same model for a trial."""
        return replace(self, near_thresholds=True)

    def view(self, attention: str) -> tuple[nn.Module, Blocks]:
        """A private view that runs with `attention`, and its blocks."""
        # accelerate moves a model's weights through hooks of its own: such a model runs itself
        has_own_hooks = any(hasattr(module, "_hf_hook") for module in self.model.modules())
        model = self.model if has_own_hooks else private_view(self.model)
        set_attention(model, attention)
        if self.near_thresholds:
            _bring_near(model)
        return model, find_blocks(model)

    @property
    def attentions(self) -> list[str]:
        """Implementations to try, the faster first."""
        own = str(getattr(self.model.config, "_attn_implementation", None) or "eager")
        return list(dict.fromkeys((own, "eager")))

    @property
    def batched_attentions(self) -> list[str]:
        """The same for batched generation; on CUDA with a fused kernel before them."""
        on_cuda = next(self.model.parameters()).device.type == "cuda"
        return [PAGED, *self.attentions] if on_cuda else self.attentions

    @property
    def ordinary_ids(self) -> list[int]:
        """Token ids to which the configuration gives no meaning of its own (a picture, an end)."""
        special = {
            value
            for config in configurations(self.model)
            for name, value in vars(config).items()
            if isinstance(value, int) and name.endswith(("token_id", "token_index"))
        }
        some = range(min(8, self.vocab_size - 1), min(self.vocab_size, _MOST_IDS))
        return [token_id for token_id in some if token_id not in special]


def _bring_near(view: nn.Module) -> None:
    for thing in (*configurations(view), *view.modules()):
        for name in list(_windows(vars(thing))):
            setattr(thing, name, _WINDOW)
    for config in configurations(view):
        for owner in _rotary_owners(vars(config)):
            if owner[_ROTARY_SWITCH_NAME] > _ROTARY_SWITCH:
                owner[_ROTARY_SWITCH_NAME] = _ROTARY_SWITCH


def _windows(attributes: dict[str, Any]) -> Iterator[str]:
    for name, value in attributes.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and value > _WINDOW and "layers" not in name and any(part in name for part in _WINDOW_NAMES):
            yield name


def _rotary_owners(attributes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The dictionaries (a configuration's own, its rotary parameters) that say where a long rotary scaling begins."""
    rotary = attributes.get("rope_parameters")
    nested = [rotary, *rotary.values()] if isinstance(rotary, dict) else []
    parameters = [found for found in nested if isinstance(found, dict)]
    if any(found.get("rope_type") == "longrope" for found in parameters):
        for owner in (attributes, *parameters):
            if isinstance(owner.get(_ROTARY_SWITCH_NAME), int):
                yield owner
