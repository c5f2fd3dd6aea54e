"""A picture of a sample: how long its rows are, and how much each layer turns them. Needs matplotlib (`layertap[plot]`)."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from layertap.datasets.inspection import SampleView, norms, similarities
from layertap.errors import OptionError
from layertap.files.values import Floats

_MOST_LABELS = 64
_LABEL_CHARACTERS = 14


def draw(view: SampleView, texts: Sequence[str] | None, path: Path) -> None:
    """Draw norm and similarity by layer and token.

    Args:
        view: the sample.
        texts: its tokens spelled out, for the axis.
        path: where the picture goes; the suffix decides its format.

    Raises:
        OptionError: matplotlib isn't installed, or doesn't know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("pictures need matplotlib: pip install 'layertap[plot]'") from None
    num_tokens, num_layers = view.rows.shape[:2]
    pairs = num_layers > 1
    width = float(np.clip(3 + 0.19 * num_tokens, 8, 16))
    height = float(np.clip(0.2 * num_layers, 1.8, 6))
    figure = Figure(figsize=(width, (2 if pairs else 1) * height + 2.2), layout="constrained")
    axes: Any = figure.subplots(2 if pairs else 1, 1, squeeze=False, sharex=True)[:, 0]
    lengths = np.log10(np.maximum(norms(view.rows), 1e-9))
    labels = [str(layer) for layer in view.layers]
    _heatmap(figure, axes[0], lengths.T, labels, "viridis", "log10 of the norm", "norm of the residual stream")
    if pairs:
        steps = [f"{low} to {high}" for low, high in pairwise(labels)]
        cosines = similarities(view.rows).T
        _heatmap(
            figure, axes[1], cosines, steps, "magma", "cosine", "similarity to the layer before (dark: much changes)"
        )
    _label_tokens(axes[-1], view, texts)
    figure.suptitle(f"{view.title}\n{Path(view.model).name}, {num_tokens} tokens", fontsize=11)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as exc:
        raise OptionError(f"plot: {path}: {exc}") from exc


def _heatmap(figure: Any, axis: Any, values: Floats, labels: list[str], colours: str, unit: str, title: str) -> None:
    image = axis.imshow(values, aspect="auto", origin="lower", cmap=colours, interpolation="nearest")
    figure.colorbar(image, ax=axis, label=unit, pad=0.01)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_ylabel("layer")
    step = max(1, -(-len(labels) // 16))
    axis.set_yticks(range(0, len(labels), step), labels[::step], fontsize=8)


def _label_tokens(axis: Any, view: SampleView, texts: Sequence[str] | None) -> None:
    num_tokens = len(view.token_ids)
    if texts is not None and num_tokens <= _MOST_LABELS:
        labels = [_printable(axis, text) for text in texts]
        axis.set_xticks(range(num_tokens), labels, rotation=90, fontsize=7, parse_math=False)
        axis.set_xlabel("token")
        return
    step = max(1, -(-num_tokens // 24))
    ticks = range(0, num_tokens, step)
    axis.set_xticks(ticks, [str(view.first_position + tick) for tick in ticks], fontsize=8)
    axis.set_xlabel("position")


def _printable(axis: Any, text: str) -> str:
    """Show white space, and spell out what the font has no glyph for."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties())).get_charmap()
    shown = text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\u00b7")
    shown = "".join(char if ord(char) in glyphs else f"\\u{ord(char):04x}" for char in shown)
    return shown if len(shown) <= _LABEL_CHARACTERS else shown[: _LABEL_CHARACTERS - 1] + "\u2026"
