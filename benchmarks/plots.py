"""Draw what sweep.py, extract_gpu.py and offload_gpu.py print, as SVG (text files) for the docs. Needs matplotlib.

Run as: python benchmarks/plots.py OUTPUT [OUTPUT ...] [--into docs/img]

Each OUTPUT is what a benchmark printed; its lines of JSON are read, the rest is skipped. Written are, as far as there are figures
for them, extraction-{layers,depth,length,batch,size,workloads,offload}.svg: tokens per second, beside the GEMMs alone of that run.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "layertap", "svg.fonttype": "none", "font.size": 10})

from matplotlib.axes import Axes  # noqa: E402 - settings come first, so that the same figures give the same file
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

AXES = {
    "layers": "layers saved (the deepest is the last one)",
    "depth": "deepest layer, the only one saved",
    "length": "tokens of each prompt",
    "batch": "tokens of a forward, prompts of 256",
    "size": "parameters, billions",
}
OURS, CEILING = "#1f5fa8", "#b0b0b0"
WORKLOADS = ("mixed", "early", "all", "long")


def results_of(path: Path) -> list[dict[str, Any]]:
    """The results that a benchmark printed last, one a run; lines of single points are part of them."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    results = [one for one in found if isinstance(one, dict) and "torch" in one]
    if not results:
        sys.exit(f"{path}: no line with JSON that says what was measured (its last line, as the benchmark printed it)")
    return results


def rates(axes: Axes, label: str, values: list[float]) -> None:
    """What all pictures share; values that are far apart get a logarithmic scale."""
    if max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(values) / 2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0, top=1.15 * max(values))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("tokens per second")
    axes.set_xlabel(label)
    axes.grid(visible=True, axis="y", linewidth=0.4)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(frameon=False, loc="outside lower center", ncols=2)


def sweep(name: str, points: list[dict[str, Any]], machine: str) -> Figure:
    """Tokens per second against one thing."""
    points = sorted(points, key=lambda point: point["x"])
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    xs = [point["x"] for point in points]
    axes.plot(xs, [point["gemms_tok_s"] for point in points], "--", color=CEILING, label="matrix products alone")
    axes.plot(xs, [point["tok_s"] for point in points], "o-", color=OURS, label="LLM.extract")
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs], minor=False)
    axes.tick_params(axis="x", which="minor", bottom=False)
    rates(axes, AXES[name], [point[name] for point in points for name in ("tok_s", "gemms_tok_s")])
    models = sorted({point["model"] for point in points})
    axes.set_title(f"{models[0] if len(models) == 1 else 'Qwen3 shapes'}, {machine}", fontsize=10)
    return figure


def bars(labels: list[str], ours: list[float], ceilings: list[float], title: str) -> Figure:
    """Tokens per second of a few cases, each with its share of its ceiling."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(labels))
    axes.bar([place + 0.2 for place in places], ceilings, 0.38, color=CEILING, label="matrix products alone")
    axes.bar([place - 0.2 for place in places], ours, 0.38, color=OURS, label="LLM.extract")
    for place, rate, ceiling in zip(places, ours, ceilings, strict=True):
        axes.annotate(f"{rate / ceiling:.2f}", (place - 0.2, rate), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(list(places), labels)
    rates(axes, "", [*ours, *ceilings])
    axes.set_title(title, fontsize=10)
    return figure


def machine_of(result: dict[str, Any]) -> str:
    """What it ran on."""
    return f"{result['gpu']}, torch {result['torch']}"


def pictures(results: list[dict[str, Any]]) -> dict[str, Figure]:
    """All that can be drawn; of two runs that measured the same thing the later one."""
    found: dict[str, Figure] = {}
    for result in results:
        points = result.get("points", [])
        for name in AXES:
            chosen = [point for point in points if point["sweep"] == name]
            if chosen:
                found[name] = sweep(name, chosen, machine_of(result))
        done = [name for name in WORKLOADS if isinstance(result.get(name), dict) and "gemms_tok_s" in result[name]]
        if done:
            ours = [statistics.median(result[name]["files_tok_s"]) for name in done]
            ceilings = [result[name]["gemms_tok_s"] for name in done]
            title = f"Every file published, read and verified; {machine_of(result)}"
            found["workloads"] = bars(done, ours, ceilings, title)
        cases = result.get("cases", [])
        if cases and all("cap_GiB" in case for case in cases):
            labels = [f"{case['cap_GiB']:g} GiB\n{case['resident']} of {case['blocks']} blocks stay" for case in cases]
            ours = [max(case["tok_s"]) for case in cases]
            title = f"32B shape in capped memory; {machine_of(result)}"
            found["offload"] = bars(labels, ours, [case["gemms_tok_s"] for case in cases], title)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "docs" / "img")
    arguments = parser.parse_args()
    drawn = pictures([result for path in arguments.outputs for result in results_of(path)])
    if not drawn:
        sys.exit("nothing to draw: none of these is an output of sweep.py, extract_gpu.py or offload_gpu.py")
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        path = arguments.into / f"extraction-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
