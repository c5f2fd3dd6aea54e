"""`layertap inspect`: what a file or a data set holds."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.cli.reporting import bytes_text, errors_explained, fitted, plural, quiet_libraries, runs_text, say

if TYPE_CHECKING:
    from layertap.datasets.inspection import SampleView

_RAMP = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_MOST_MAP_COLUMNS = 72
_TOKEN_COLUMNS = 22
_MOST_LAYERS_SHOWN = 64


def inspect(
    path: Annotated[Path, typer.Argument(help="A file of hidden states, or a data set.", show_default=False)],
    sample: Annotated[int, typer.Option(help="Which sample of a data set to look at; negative from the end.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw a picture (PNG, SVG, PDF; needs matplotlib).", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Spell tokens with this one (folder, hub id, GGUF file).", show_default=False),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="How many massive activations to list.")] = 8,
) -> None:
    """Show what a file holds: metadata, norms by layer, massive activations, and where the layers change most.

    The checksum of what is shown is checked on the way.
    """
    quiet_libraries()
    with errors_explained():
        from layertap.datasets.inspection import token_texts, view_file, view_sample

        if path.is_dir():
            empty = _show_dataset(path)
            if empty:
                return
            view = view_sample(path, sample)
        else:
            view = view_file(path)
        texts = token_texts(view.token_ids.tolist(), tokenizer, view.model, view.revision)
        _show_sample(view, texts, top)
        if plot is not None:
            from layertap.datasets.picture import draw

            draw(view, texts, plot)
            say(f"picture: {plot}")


def _show_dataset(folder: Path) -> bool:
    from layertap.datasets.reader import open_dataset

    ds = open_dataset(folder)
    rows = ds.manifest.rows
    files = ds.files
    size = sum((folder / name).stat().st_size for name in files if (folder / name).exists())
    typer.echo(f"data set {folder}")
    facts = {
        "samples": f"{len(ds):,} in {plural(len(files), 'file')} ({ds.manifest.layout}), {bytes_text(size)}",
        "tokens": f"{ds.num_tokens:,}",
        "input": ds.manifest.input_name,
        "model": rows.model + (f" at {rows.revision}" if rows.revision else ""),
        "layers": f"{runs_text(rows.layers)} of 0 to {rows.num_layers}, hidden size {rows.hidden_size}",
        "dtype": f"{rows.save_dtype}, computed in {rows.compute_dtype}{', compressed' * bool(rows.options.get('compress'))}",
        "engine": f"{rows.engine} {rows.engine_version}",
        **{key: str(value) for key, value in ds.manifest.made_by.items()},
    }
    if len(ds):
        lengths = ds.lengths
        facts["tokens"] += f" ({lengths.min():,} to {lengths.max():,} a sample, mean {lengths.mean():,.0f})"
    _show_facts(facts)
    failures = ds.failures
    if failures:
        typer.echo(f"  {plural(len(failures), 'input')} failed:")
        for failure in failures[:5]:
            typer.echo(f"    {failure.index}: {failure.reason}")
        if len(failures) > 5:
            typer.echo(f"    and {len(failures) - 5:,} more")
    typer.echo()
    return not len(ds)


def _show_sample(view: "SampleView", texts: list[str] | None, top: int) -> None:
    from layertap.datasets.inspection import norms, peaks, similarities

    typer.echo(view.title)
    _show_facts({"model": view.model, **view.facts})
    if not view.rows.size:
        typer.echo("  no rows")
        return
    lengths, turns = norms(view.rows), similarities(view.rows)

    def token(row: int) -> str:
        name = f"{view.first_position + row} (id {view.token_ids[row]}"
        name += f" {texts[row]!r})" if texts is not None else ")"
        return name if len(name) <= _TOKEN_COLUMNS else f"{name[: _TOKEN_COLUMNS - 3]}..)"

    heads = ("med. norm", "max norm", "at position", "cosine to the layer before")
    typer.echo(f"\n  layer {heads[0]:>9s} {heads[1]:>9s}  {heads[2]:{_TOKEN_COLUMNS}s}  {heads[3]}")
    shown = list(range(len(view.layers)))
    for slot in shown[:_MOST_LAYERS_SHOWN]:
        highest = int(lengths[:, slot].argmax())
        cosine = f"{turns[:, slot - 1].mean():.3f} (lowest {turns[:, slot - 1].min():.3f})" if slot else ""
        median, largest = float(sorted(lengths[:, slot])[len(lengths) // 2]), lengths[highest, slot]
        line = f"  {view.layers[slot]:5d} {median:9.2f} {largest:9.2f}  {token(highest):{_TOKEN_COLUMNS}s}  {cosine}"
        typer.echo(line.rstrip())
    if len(shown) > _MOST_LAYERS_SHOWN:
        typer.echo(f"  and {len(shown) - _MOST_LAYERS_SHOWN} more layers (--plot shows all)")
    if turns.size:
        change = 1 - turns.mean(axis=0)
        order = change.argsort()[::-1][:3]
        steps = ", ".join(f"{view.layers[i]} to {view.layers[i + 1]} ({change[i]:.3f})" for i in order)
        typer.echo("\n" + fitted(f"  layers change most (1 - cosine): {steps}", 4))
    typer.echo("\n  largest values          layer  dimension      value  times the layer's median")
    for peak in peaks(view.rows, top):
        typer.echo(
            f"  {token(peak.token):{_TOKEN_COLUMNS}s} {view.layers[peak.slot]:6d} {peak.dimension:10d} "
            f"{peak.value:10.2f} {peak.times_median:11,.0f}"
        )
    _show_map(view, lengths)


def _show_map(view: "SampleView", lengths: "object") -> None:
    """Draw the norms in the terminal: a line a layer, a column a group of tokens, each line on its own scale."""
    import numpy as np

    values = np.log(np.maximum(np.asarray(lengths), 1e-9))
    room = shutil.get_terminal_size().columns - len("  layer ||")
    groups = np.array_split(values, min(max(1, room), _MOST_MAP_COLUMNS, len(values)))
    columns = np.stack([group.max(axis=0) for group in groups], axis=1)
    low, high = columns.min(axis=1, keepdims=True), columns.max(axis=1, keepdims=True)
    levels = np.rint((columns - low) / np.maximum(high - low, 1e-9) * (len(_RAMP) - 1)).astype(int)
    first, last = view.first_position, view.first_position + len(values) - 1
    typer.echo(f"\n  norm by layer and token (log scale, each layer on its own), positions {first} to {last}")
    step = max(1, -(-len(view.layers) // 16))
    for slot in range(0, len(view.layers), step):
        typer.echo(f"  {view.layers[slot]:5d} |{''.join(_RAMP[level] for level in levels[slot])}|")


def _show_facts(facts: dict[str, str]) -> None:
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(fitted(f"  {name:{width}s}  {value}", width + 4))
