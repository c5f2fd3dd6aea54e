"""Which ways a loaded model can go, decided by numbers and never by its name.

A few short sequences are run alone, packed and padded, and their rows compared in every layer that is loaded. Windows and
chunks are first made so small, in private views, that they cut these short sequences: a window that packing loses shows at once.
What a row moves by when only its sequence gets one token longer is the noise of the arithmetic; more than that is another
sequence leaking in.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layertap.engines.transformers.attention import configurations
from layertap.engines.transformers.packing import Way
from layertap.engines.transformers.passes import Passes, length_limit
from layertap.engines.transformers.trees import Tree
from layertap.errors import UnsupportedModelError

if TYPE_CHECKING:
    from layertap.engines.transformers.weights import Layout

__all__ = ["Routes", "choose_routes"]

logger = logging.getLogger(__name__)

_LENGTHS = (9, 23, 5, 14)
_WINDOW = 4
_WINDOW_NAMES = ("window", "attention_chunk", "chunk_attention", "local_attention")
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_SEED = 20_240
_NUMBER = re.compile(r"(?:^|_)(?:idx|index|id|number|num)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """How the sequences of a model may share a forward.

    Attributes:
        packed: end to end in one row.
        shared: packed, with what they have in common at their beginnings once.
        padded: side by side, padded on the right.
        reason: what the self-test found.
        max_together: longest sequence that may share a forward, or None for any; longer ones go alone.
        attention: implementation to run with what isn't packed; None is the model's own.
    """

    packed: bool
    padded: bool
    shared: bool = False
    reason: str
    max_together: int | None = None
    attention: str | None = None

    @property
    def way(self) -> Way:
        """The fastest way that gives right rows."""
        return "packed" if self.packed else "padded" if self.padded else "alone"

    def __str__(self) -> str:
        bound = f" (up to {self.max_together} tokens)" if self.max_together is not None and self.way != "alone" else ""
        return f"{self.way}{bound}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Verdict:
    good: bool
    text: str


def choose_routes(model: nn.Module, layout: Layout, depth: int) -> Routes:
    """Run the self-test on the first `depth` blocks of a model.

    Raises:
        UnsupportedModelError: its stream has no row for each token, or it changes its own weights while it runs.
    """
    if layout.streamer is not None:
        depth = _distinct_depth(layout.blocks_of(model)[:depth])
    before = _versions(model)
    routes = _choose(model, layout, depth)
    if _versions(model) != before:
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its own weights while it runs, so rows would depend on what ran before"
        )
    logger.info("self-test over %d blocks: %s", depth, routes)
    return routes


def _distinct_depth(blocks: Sequence[nn.Module]) -> int:
    """How many blocks it takes until each kind has been met, and one more: where each forward brings all weights from the host,
    others of the same kind (modules, shapes and settings) would take long and add nothing."""
    kinds: set[Any] = set()
    deepest = 0
    for index, block in enumerate(blocks):
        kind = tuple(
            (
                name,
                type(module),
                _settings(module, index),
                tuple((n, p.shape) for n, p in module._parameters.items() if p is not None),
            )
            for name, module in block.named_modules()
        )
        if kind not in kinds:
            kinds.add(kind)
            deepest = index + 1
    return min(deepest + 1, len(blocks))


def _settings(module: nn.Module, index: int) -> tuple[tuple[str, Any], ...]:
    """Plain attributes, but for the block's own number."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | None)
        and not (type(value) is int and value == index and _NUMBER.search(name))
    )


def _versions(model: nn.Module) -> list[int]:
    return [parameter._version for parameter in model.parameters()]


def _choose(model: nn.Module, layout: Layout, depth: int) -> Routes:
    windows = _windows(model, layout)
    shrink = functools.partial(_shrink_windows, layout=layout)
    adapt = shrink if windows else None
    layers = tuple(range(depth + 1))
    limit = length_limit(model)
    sequences = _sequences(model, limit)
    if getattr(model, "hf_quantizer", None) is not None:
        _compare_with_itself(model, layout, sequences, layers)
    attention = _trusted_attention(model, layout, adapt, sequences, layers)
    passes = Passes(model, layout, attention, adapt)
    truth = _alone(passes, sequences, layers)
    longer = _alone(passes, [[*sequence, sequence[0]] for sequence in sequences], layers)
    tolerance = _tolerance(truth[0].dtype)
    noise = _difference(truth, [rows[:-1] for rows in longer])
    if not noise < 10 * tolerance:
        return Routes(
            packed=False, padded=False, reason=f"rows move by {noise:.1e} when a token is appended: not causal"
        )
    bound = max(tolerance, 4 * noise)
    packed = _compare(passes, "packed", sequences, layers, truth, bound)
    if packed.good and windows and not _windows_bite(model, layout, attention, sequences, layers, truth):
        limit = min(windows) if limit is None else min(limit, *windows)
    shared = packed.good and limit is None and _shares(passes, sequences, layers, bound)
    padded = _compare(passes, "padded", sequences, layers, truth, bound)
    reason = f"packed {packed.text}, padded {padded.text}"
    if attention is not None:
        reason += f"; {attention} attention where not packed, since the model's own gives other rows"
    if limit is not None:
        reason += f"; sequences over {limit} tokens go alone"
    return Routes(
        packed=packed.good,
        padded=padded.good,
        shared=shared,
        reason=reason,
        max_together=limit,
        attention=attention,
    )


def _compare_with_itself(
    model: nn.Module, layout: Layout, sequences: Sequence[Sequence[int]], layers: Sequence[int]
) -> None:
    """Are rows of a view those of the model? What a quantized layer keeps beside its weights may not come along.

    The model runs first: some libraries finish their layers in the first forward.

    Raises:
        UnsupportedModelError: they aren't.
    """
    passes = Passes(model, layout)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    itself = []
    for sequence in sequences:
        rows = torch.zeros(len(sequence), len(layers), layout.hidden_size, dtype=dtype, device=passes.device)
        passes.run_itself(sequence, layers, rows)
        itself.append(rows)
    difference = _difference(itself, _alone(passes, sequences, layers))
    if difference > _tolerance(dtype):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its quantized layers can't be shared by a second way through the model (rows differ by "
            f"{difference:.1e} from the model's own), so it can't be extracted from; take another quantization"
        )


def _trusted_attention(
    model: nn.Module,
    layout: Layout,
    adapt: Callable[[nn.Module], None] | None,
    sequences: Sequence[Sequence[int]],
    layers: Sequence[int],
) -> str | None:
    """The model's own implementation, or eager where its own forgets something (transformers' sdpa has no soft caps)."""
    configs = configurations(model)
    if all(config._attn_implementation in ("eager", None) for config in configs):
        return None
    if any(
        "attn" in name and "softcap" in name and value for config in configs for name, value in vars(config).items()
    ):
        return "eager"
    own = _alone(Passes(model, layout, None, adapt), sequences, layers)
    eager = _alone(Passes(model, layout, "eager", adapt), sequences, layers)
    return None if _difference(eager, own) <= 2 * _tolerance(own[0].dtype) else "eager"


def _sequences(model: nn.Module, limit: int | None) -> list[list[int]]:
    config: Any = model.config
    generator = torch.Generator().manual_seed(_SEED)
    special = {
        value
        for c in configurations(model)
        for name, value in vars(c).items()
        if isinstance(value, int) and name.endswith(("token_id", "token_index"))
    }
    vocabulary = min(config.get_text_config(decoder=True).vocab_size, 50_000)
    ordinary = [token for token in range(vocabulary) if token not in special]
    lengths = [max(2, min(length, limit - 1)) if limit else length for length in _LENGTHS]
    return [
        [ordinary[int(i)] for i in torch.randint(len(ordinary), (length,), generator=generator)] for length in lengths
    ]


def _run(passes: Passes, way: Way, sequences: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
    dtype = next(passes.model.parameters()).dtype
    lengths = [len(sequence) for sequence in sequences]
    rows = torch.zeros(sum(lengths), len(layers), passes.layout.hidden_size, dtype=dtype, device=passes.device)
    passes.run(way, sequences, [range(length) for length in lengths], layers, rows)
    return list(torch.split(rows, lengths))


def _alone(passes: Passes, sequences: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
    return [_run(passes, "alone", [sequence], layers)[0] for sequence in sequences]


def _compare(
    passes: Passes,
    way: Way,
    sequences: Sequence[Sequence[int]],
    layers: Sequence[int],
    truth: list[Tensor],
    bound: float,
) -> _Verdict:
    try:
        difference = _difference(truth, _run(passes, way, sequences, layers))
    except Exception as exc:  # noqa: BLE001 - whatever a model raises here, it can't go this way; the reason is kept
        return _Verdict(False, f"no ({type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''})")
    if difference <= bound:
        return _Verdict(True, f"yes ({difference:.0e})")
    return _Verdict(False, f"no (rows differ by {difference:.1e})")


def _shares(passes: Passes, sequences: Sequence[Sequence[int]], layers: Sequence[int], bound: float) -> bool:
    """Whether sequences of a common trunk, with branches of branches, give the rows that they give alone."""
    short, trunk, shorter, branch = sequences
    family = [[*trunk, *short], [*trunk, *branch], [*trunk, *branch[:4], *shorter]]
    tree = Tree.of(family)
    try:
        truth = _alone(passes, family, layers)
        rows = torch.zeros(tree.num_rows, *truth[0].shape[1:], dtype=truth[0].dtype, device=passes.device)
        passes.run("shared", family, tree.own, layers, rows)
    except Exception as exc:  # noqa: BLE001 - as in `_compare`
        logger.info("common beginnings are computed for each sequence: %s: %s", type(exc).__name__, exc)
        return False
    found = [torch.cat([rows[begin:end] for begin, end in spans]) for spans in tree.rows]
    return _difference(truth, found) <= bound


def _difference(truth: Sequence[Tensor], rows: Sequence[Tensor]) -> float:
    """Largest relative row error; in 16 bits the largest median of a sequence in a layer, since single rows are noisy there."""
    worst = 0.0
    for a, b in zip(truth, rows, strict=True):
        exact, given = a.double(), b.double()
        errors = (exact - given).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
        errors = errors if a.dtype in (torch.float32, torch.float64) else errors.median(dim=0).values
        worst = max(worst, float(errors.max())) if bool(torch.isfinite(errors).all()) else float("inf")
    return worst


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 3e-2)


def _window_fields(thing: Any) -> dict[str, int]:
    """Numbers that say how far attention sees."""
    return {
        name: value
        for name, value in vars(thing).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > _WINDOW and any(w in name for w in _WINDOW_NAMES)
        and "layers" not in name
    }  # fmt: skip


def _decoder_parts(model: nn.Module, layout: Layout) -> list[Any]:
    """Modules and configurations of the text decoder; a vision tower has windows too, which have nothing to do with tokens."""
    decoder = model.get_submodule(layout.found.decoder_path)
    config: Any = model.config
    return [config, config.get_text_config(decoder=True), *configurations(decoder), *decoder.modules()]


def _windows(model: nn.Module, layout: Layout) -> list[int]:
    things = _decoder_parts(model, layout)
    return [value for thing in things for value in _window_fields(thing).values()]


def _shrink_windows(view: nn.Module, layout: Layout) -> None:
    for thing in _decoder_parts(view, layout):
        for name in _window_fields(thing):
            setattr(thing, name, _WINDOW)


def _windows_bite(
    model: nn.Module,
    layout: Layout,
    attention: str | None,
    sequences: Sequence[Sequence[int]],
    layers: Sequence[int],
    truth: list[Tensor],
) -> bool:
    """Whether shrinking the windows changed the rows, so that the comparison has tested them."""
    return _difference(_alone(Passes(model, layout, attention), sequences, layers), truth) > 10 * _TOLERANCE.get(
        truth[0].dtype, 3e-2
    )
