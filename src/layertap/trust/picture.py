"""A picture of the errors by layer. Needs matplotlib (`layertap[plot]`)."""

from pathlib import Path

from layertap.errors import OptionError
from layertap.trust.findings import Report

_FLOOR = 1e-9  # zero has no place on a logarithmic axis


def draw_errors(report: Report, path: Path) -> None:
    """Draw the median and the worst error of each layer against the tolerance.

    Args:
        report: with errors by layer.
        path: where the picture goes; the suffix decides its format.

    Raises:
        OptionError: matplotlib isn't installed, doesn't know the format, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise OptionError("pictures need matplotlib: pip install 'layertap[plot]'") from None
    if not report.layers:
        raise OptionError(
            f"picture: {path}: no rows were compared, so there are no errors to draw; the findings say why"
        )
    layers = [entry.layer for entry in report.layers]
    tolerance = report.layers[0].tolerance
    figure = Figure(figsize=(max(7.0, min(16.0, 3 + 0.22 * len(layers))), 4.2), layout="constrained")
    axis = figure.subplots()
    median = [max(entry.median, _FLOOR) for entry in report.layers]
    worst = [max(entry.worst, _FLOOR) for entry in report.layers]
    axis.fill_between(layers, median, worst, color="tab:blue", alpha=0.15, linewidth=0)
    axis.plot(layers, worst, "v", color="tab:blue", markersize=5, label="worst row")
    axis.plot(layers, median, "o-", color="tab:blue", markersize=4, label="median row")
    axis.axhline(tolerance, color="tab:red", linestyle="--", linewidth=1.2, label=f"tolerance {tolerance:g}")
    bad = [entry for entry in report.layers if entry.median > entry.tolerance]
    axis.plot(
        [entry.layer for entry in bad],
        [max(entry.median, _FLOOR) for entry in bad],
        "o",
        color="tab:red",
        markersize=8,
        label="layers that must not be used" if bad else None,
    )
    axis.set_yscale("log")
    axis.set_xlabel("layer (the stream that enters the block; the last: what the last block puts out)")
    axis.set_ylabel("relative error of a row")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", alpha=0.3)
    axis.legend(loc="best", fontsize=9, framealpha=0.9)
    figure.suptitle(
        f"{Path(report.model).name} on the {report.engine} engine, against transformers in float32", fontsize=11
    )
    try:
        figure.savefig(path, dpi=130)
    except ValueError as exc:
        raise OptionError(f"picture: {path}: {exc}") from exc
