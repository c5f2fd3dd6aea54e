"""What a checkpoint says about generating: the tokens that end a text, and its own sampling defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

if TYPE_CHECKING:
    from layertap.engines.transformers.load import ModelSource

__all__ = ["read_generation_config"]

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
"""The fields that vLLM takes its default sampling parameters from, and what it calls them."""


def read_generation_config(source: ModelSource) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Read the ids that end a generation, the configuration's own first, and the sampling defaults that differ from none.

    A checkpoint without `generation_config.json` has the ids of its configuration and no defaults.
    """
    stated = _stated(source)
    ids = [*_ids(source.text_config), *_ids(source.config), *([] if stated is None else _ids(stated))]
    defaults = {} if stated is None else stated.to_diff_dict()
    sampling = {ours: defaults[theirs] for theirs, ours in _SAMPLING.items() if defaults.get(theirs) is not None}
    return tuple(dict.fromkeys(ids)), sampling


def _stated(source: ModelSource) -> GenerationConfig | None:
    if Path(source.path).is_dir() and not (Path(source.path) / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(source.path, revision=source.revision)
    except OSError:  # the hub has none
        return None


def _ids(config: Any) -> list[int]:
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return []
    return [int(i) for i in (value if isinstance(value, list | tuple) else [value])]
