"""Samples that begin alike: their common rows are computed and stored once (`share_prefixes`).

In a causal model a row depends on the tokens up to its own and nothing else, so samples with one system prompt, the answers of a
group to one prompt, and the turns of a chat that was cut into records have rows in common. That is tried on the model before
anything is shared. A window of the input is sorted by its tokens here, and what is the whole beginning of another sample isn't run
at all; what goes different ways is run together (`engines.transformers.trees`); and the writer stores what lies in the open shard
already only once (`datasets.prefixes`).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from layertap.engines.base import ModelInfo
from layertap.errors import ExtractionError, LayertapError, OptionError
from layertap.llm import LLM

WINDOW = 512
"""Records of the input that are compared with one another."""

_WHOLE, _BEGINNING = 61, 23
# far above rounding, far below what a token that sees the ones behind it makes of a row
_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_16 = 5e-2


def hosts_of(sequences: Sequence[list[int]]) -> list[int | None]:
    """Say of each sequence which other one it is the beginning of (or equal to); None where there is none.

    A host has no host itself.
    """
    found: list[int | None] = [None] * len(sequences)
    # what begins with a sequence stands right behind it in this order
    order = sorted(range(len(sequences)), key=lambda number: sequences[number])
    host: int | None = None
    for number in reversed(order):
        mine = sequences[number]
        if host is not None and sequences[host][: len(mine)] == mine:
            found[number] = host
        else:
            host = number
    return found


def refuse_unless_causal(llm: LLM, layers: Sequence[int]) -> None:
    """Try whether a row depends on the tokens up to its own alone.

    Raises:
        OptionError: it doesn't, or that can't be known.
    """
    info = llm.info
    kind = _length_dependent(info)
    if kind is not None:
        raise OptionError(
            f"share_prefixes: the rotary table of {info.model} ({kind}) depends on the length of the whole sequence, so the "
            "rows of a beginning aren't those of the whole"
        )
    whole = min(_WHOLE, info.max_model_len)
    beginning = min(_BEGINNING, whole - 1)
    draw = random.Random(0)
    ids = [draw.randrange(info.vocab_size) for _ in range(whole)]
    prompts = [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[:beginning]}]
    try:
        # one after the other, so that neither can be mixed up with the other's company
        first, second = (next(iter(llm.extract([prompt], layers=layers))).hidden_states.float() for prompt in prompts)
    except (ExtractionError, LayertapError) as exc:
        raise OptionError(f"share_prefixes: can't be tried on {info.model}: {exc}") from exc
    expected = first[:beginning]
    size = torch.linalg.norm(expected, dim=-1)
    off = float((torch.linalg.norm(second - expected, dim=-1) / size.clamp_min(1e-30)).max())
    if not off <= _TOLERANCE.get(info.dtype, _TOLERANCE_16):
        raise OptionError(
            f"share_prefixes: rows of {info.model} depend on the tokens behind them, or on the length (rows of a beginning differ "
            f"by {off:.1e} from those of the whole), so samples can't share rows"
        )


def _length_dependent(info: ModelInfo) -> str | None:
    """The kind of a rotary table that changes with the length; a short trial can't find it."""
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(info.model, revision=info.revision)
    except (OSError, ValueError):
        return None  # a GGUF file: its format knows none
    return next((kind for kind in _rope_kinds(config) if "dynamic" in kind or kind == "longrope"), None)


def _rope_kinds(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("rope_type", "type") and isinstance(inner, str):
                yield inner
            else:
                yield from _rope_kinds(inner)
