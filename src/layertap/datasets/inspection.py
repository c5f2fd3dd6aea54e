"""What a sample looks like: norms, massive activations, and where the stream turns from layer to layer. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.datasets.reader import open_dataset
from layertap.errors import OptionError
from layertap.files.read import read_file
from layertap.files.values import Floats, to_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample, opened for looking at it."""

    title: str
    rows: Floats
    """[tokens, layers, hidden]"""
    token_ids: NDArray[np.int64]
    layers: tuple[int, ...]
    first_position: int
    model: str
    revision: str | None
    save_dtype: str
    compute_dtype: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peak:
    """One value that stands out of its layer."""

    token: int
    """Row of the sample."""
    slot: int
    """Place of the layer among those saved."""
    dimension: int
    value: float
    times_median: float
    """Its size over the median size of the layer's values."""


def view_file(path: Path) -> SampleView:
    """Open one file and check it.

    Raises:
        HiddenStatesError: it can't be delivered.
    """
    loaded = read_file(path, timeout=0)
    info = loaded.info
    facts = {
        "dtype": info.dtype,
        "rows": f"{info.num_rows} (positions {info.first_position} to {info.first_position + info.num_rows - 1})",
        "prompt": f"{info.prompt_len} tokens of {info.num_tokens}",
        "blocks": f"{info.num_layers}, hidden size {info.hidden_size}",
        **dict(sorted(info.facts.items())),
    }
    return SampleView(
        title=path.name,
        rows=to_float32(loaded.rows, info.dtype),
        token_ids=loaded.token_ids,
        layers=info.layers,
        first_position=info.first_position,
        model=info.model,
        revision=info.facts.get("revision") or None,
        save_dtype=info.dtype,
        compute_dtype=info.facts.get("compute_dtype", info.dtype),
        facts=facts,
    )


def view_sample(folder: Path, position: int) -> SampleView:
    """Open one sample of a data set and check it.

    Raises:
        OptionError: there is no such sample.
        HiddenStatesError: it can't be delivered.
    """
    ds = open_dataset(folder, verify=True)
    if not -len(ds) <= position < len(ds):
        raise OptionError(f"sample: {position} of a data set of {len(ds)} samples")
    raw, token_ids = ds.raw(position)
    entry = ds.entry(position)
    facts = {
        "input index": str(entry.index),
        "file": f"{entry.file} rows {', then '.join(f'{start} to {end - 1}' for start, end in entry.spans)}",
        "rows": str(entry.tokens),
        "prompt": f"{entry.prompt_tokens} tokens" if entry.prompt_tokens >= 0 else "unknown",
        "finish_reason": str(entry.finish_reason),
    }
    if entry.sample_id is not None:
        facts["id"] = entry.sample_id
    return SampleView(
        title=f"{folder.name} sample {entry.index}",
        rows=to_float32(raw.reshape(len(raw), len(ds.layers), -1), ds.dtype),
        token_ids=np.array(token_ids),
        layers=ds.layers,
        first_position=0,
        model=ds.manifest.rows.model,
        revision=ds.manifest.rows.revision,
        save_dtype=ds.dtype,
        compute_dtype=ds.manifest.rows.compute_dtype,
        facts=facts,
    )


def norms(rows: Floats) -> Floats:
    """Return the length of each row: [tokens, layers]."""
    lengths: Floats = np.linalg.norm(rows, axis=-1)
    return lengths


def similarities(rows: Floats) -> Floats:
    """Return the cosine between each saved layer and the one before: [tokens, layers - 1]."""
    before, after = rows[:, :-1], rows[:, 1:]
    lengths = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    cosines: Floats = np.einsum("tlh,tlh->tl", before, after) / np.maximum(lengths, np.finfo(np.float32).tiny)
    return cosines


def peaks(rows: Floats, count: int) -> list[Peak]:
    """Find the values that stand out most of their layer; of one token's dimension, only where it does so most."""
    sizes = np.abs(rows)
    medians = np.maximum(np.median(sizes, axis=(0, 2)), np.finfo(np.float32).tiny)
    dimensions = sizes.argmax(axis=2)
    ratios = sizes.max(axis=2) / medians
    found: dict[tuple[int, int], Peak] = {}
    for flat in np.argsort(ratios, axis=None)[::-1].tolist():
        if len(found) == count:
            break
        token, slot = divmod(flat, rows.shape[1])
        dimension = int(dimensions[token, slot])
        peak = Peak(token, slot, dimension, float(rows[token, slot, dimension]), float(ratios[token, slot]))
        found.setdefault((token, dimension), peak)
    return list(found.values())


def token_texts(token_ids: Sequence[int], tokenizer: str | None, model: str, revision: str | None) -> list[str] | None:
    """Spell tokens out, where a tokenizer is at hand.

    Args:
        token_ids: the tokens.
        tokenizer: folder, hub id or GGUF file; None looks only for the model's `tokenizer.json` on this machine.
        model: the model's name.
        revision: of the hub.
    """
    if tokenizer is not None:
        loaded = _load_tokenizer(tokenizer)
        return [_spelled(token, str(loaded.decode([token]))) for token in token_ids]
    rules = Path(model) / "tokenizer.json"
    if not rules.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "tokenizer.json", revision=revision)
        except HFValidationError:  # a path
            return None
        if not isinstance(cached, str):
            return None
        rules = Path(cached)
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(rules))
    return [_spelled(token, fast.decode([token], skip_special_tokens=False)) for token in token_ids]


def _spelled(token: int, text: str) -> str:
    # a token that is only some bytes of a character has no text
    return f"#{token}" if "\ufffd" in text else text


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    path = Path(name)
    try:
        if path.is_file():
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise OptionError(f"tokenizer: can't read that of {name}: {exc}") from exc
