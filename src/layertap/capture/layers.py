"""Layer ids and presets: from what a caller wrote to a tuple of ids.

Id `L` is the residual stream that enters block `L`: 0 is the embeddings, `num_layers` what the last block put out,
before the final norm. Negative ids count from the end: -1 is `num_layers`. The caller's order is kept; it is the order
of the rows in the file.

The presets are those of the draft-model trainers: `eagle3` is vLLM's and SpecForge's (2, n // 2, n - 3), `dflash` k ids
spread over the depth, round(1 + i * (n - 4) / (k - 1)) + 1.
"""

import difflib
import re
from collections.abc import Sequence
from typing import TypeAlias

from layertap.errors import LayerError

LayersLike: TypeAlias = str | int | Sequence[int | str]

DEFAULT_LAYERS = "eagle3"
"""Where nobody has named any."""

PRESETS = ("all", "last", "eagle3", "dflash", "dflash:K", "eagle3+last")


def resolve_layers(layers: LayersLike, num_layers: int) -> tuple[int, ...]:
    """Turn `layers` into ids in 0..num_layers.

    Args:
        layers: an id, a sequence of ids, a string such as "1,2,-1" or "2-5" (both ends included), a preset (`all`,
            `last`, `eagle3`, `dflash`, `dflash:7`), or terms joined by "+" or ",": "eagle3+last".
        num_layers: the number of blocks of the model (`num_hidden_layers`).

    Returns:
        The ids in the order asked for.

    Raises:
        LayerError: an id doesn't exist, stands twice, or a word is no preset; no ids at all.
    """
    terms: list[int | str]
    if isinstance(layers, bool):
        raise LayerError(f"layers: expected ids or a preset, got {layers!r}")
    if isinstance(layers, int):
        terms = [layers]
    elif isinstance(layers, str):
        listed = re.fullmatch(r"\s*\[(.*)\]\s*", layers)  # as JSON and Python write a list
        words = re.split(r"[,+]", listed[1] if listed else layers)
        terms = [term for term in (word.strip() for word in words) if term]
    elif isinstance(layers, Sequence):
        terms = list(layers)
    else:
        raise LayerError(f"layers: expected ids or a preset, got {type(layers).__name__} {layers!r}")
    ids = [layer for term in terms for layer in _resolve_term(term, num_layers)]
    if not ids:
        raise LayerError("layers: no layer was given; use ids such as [2, 18, 33] or a preset such as 'eagle3'")
    seen: set[int] = set()
    for layer in ids:
        if layer in seen:
            raise LayerError(
                f"layers: layer {layer} stands twice in {layers!r}"
                + (f" (ids count 0..{num_layers}; -1 is {num_layers})" if _has_negative(terms) else "")
            )
        seen.add(layer)
    return tuple(ids)


def select_slots(layers: LayersLike, available: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Resolve a request's layers where only some are captured (a server's).

    Raises:
        LayerError: a layer isn't among `available`.
    """
    wanted = resolve_layers(layers, num_layers)
    missing = [layer for layer in wanted if layer not in available]
    if missing:
        raise LayerError(f"layers: {missing} are not captured by this server, which captures {list(available)}")
    return wanted


def _has_negative(terms: Sequence[int | str]) -> bool:
    return any(str(term).startswith("-") for term in terms)


def _resolve_term(term: int | str, num_layers: int) -> list[int]:
    if isinstance(term, bool) or not isinstance(term, int | str):
        raise LayerError(f"layers: expected an id or a preset, got {type(term).__name__} {term!r}")
    if isinstance(term, int):
        return [_resolve_id(term, num_layers)]
    if re.fullmatch(r"-?\d+", term):
        return [_resolve_id(int(term), num_layers)]
    if span := re.fullmatch(r"(\d+)-(\d+)", term):
        first, last = int(span[1]), int(span[2])
        if last < first:
            raise LayerError(f"layers: the range {term!r} runs backwards")
        return [_resolve_id(layer, num_layers) for layer in (*range(first, min(last, num_layers + 1)), last)]
    if site := re.fullmatch(r"-?\d+\.([a-z_]\w*)", term, re.IGNORECASE):
        raise LayerError(f"layers: {term!r}: only the residual stream can be taken, not the site {site[1]!r}")
    return _resolve_preset(term, num_layers)


def _resolve_id(layer: int, num_layers: int) -> int:
    resolved = layer + num_layers + 1 if layer < 0 else layer
    if not 0 <= resolved <= num_layers:
        raise LayerError(
            f"layers: layer {layer} doesn't exist: the model has {num_layers} blocks, so ids are 0 (the embeddings) to "
            f"{num_layers} (the last block's output), or -1 to -{num_layers + 1} from the end"
        )
    return resolved


def _resolve_preset(name: str, num_layers: int) -> list[int]:
    if name == "all":
        return list(range(num_layers + 1))
    if name == "last":
        return [num_layers]
    if name == "eagle3":
        return _spread("eagle3", [2, num_layers // 2, num_layers - 3], num_layers)
    if preset := re.fullmatch(r"dflash(?::(\d+))?", name):
        count = int(preset[1]) if preset[1] else 5
        if count < 2:
            raise LayerError(f"layers: {name!r}: dflash takes at least 2 layers")
        ids = [_round_half_even(i * (num_layers - 4) + count - 1, count - 1) + 1 for i in range(count)]
        return _spread(name, ids, num_layers)
    near = difflib.get_close_matches(name, ["all", "last", "eagle3", "dflash"], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise LayerError(f"layers: {name!r} is neither an id nor a preset{hint} (presets: {', '.join(PRESETS)})")


def _round_half_even(numerator: int, denominator: int) -> int:
    # exact, where round(a / b) would depend on the float
    quotient, rest = divmod(numerator, denominator)
    twice = 2 * rest - denominator
    return quotient + (1 if twice > 0 or (twice == 0 and quotient % 2 == 1) else 0)


def _spread(preset: str, ids: list[int], num_layers: int) -> list[int]:
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) > num_layers:
        raise LayerError(
            f"layers: the preset {preset!r} gives {ids} for a model of {num_layers} blocks, which is too shallow for it; "
            "name the ids"
        )
    return ids
