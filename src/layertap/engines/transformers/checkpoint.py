"""The files of a checkpoint that a part of the model needs: of a sharded one only the shards with those blocks in them.

transformers opens (and from the hub downloads) every shard of an index. For a part, it gets a folder of links to the shards
that are needed, with an index that names no others; so a deep shard may be missing, and is never fetched.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from layertap.engines.transformers.load import ModelSource
from layertap.errors import ModelError

__all__ = ["checkpoint_for"]

_GIT_LFS = b"version https://git-lfs.github.com"
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@contextmanager
def checkpoint_for(source: ModelSource, needed: tuple[str, range] | None) -> Iterator[str]:
    """Give the path to load from.

    Args:
        source: the model.
        needed: path of the list of blocks, and which of them are needed; None for everything.

    Raises:
        ModelError: a needed file is missing or corrupt.
    """
    folder = Path(source.path)
    if source.gguf_file:
        yield source.path
        return
    index_file = _index_file(source)
    if index_file is None:
        if folder.is_dir():
            _check_headers(sorted(folder.glob("model.safetensors")))
        yield source.path
        return
    try:
        index = json.loads(index_file.read_text())
        weight_map: dict[str, str] = index["weight_map"]
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{index_file} is corrupt: {type(exc).__name__}: {exc}") from exc
    if needed is not None:
        weight_map = {key: shard for key, shard in weight_map.items() if not _is_other_block(key, *needed)}
    shards = sorted(set(weight_map.values()))
    folder = folder if folder.is_dir() else _download(source, shards)
    missing = [name for name in shards if not (folder / name).exists()]
    if missing:
        raise ModelError(
            f"{folder / missing[0]} is missing; {index_file.name} says that it holds weights that are needed"
        )
    _check_headers([folder / name for name in shards])
    with tempfile.TemporaryDirectory(prefix="layertap-") as view:
        # transformers also reads the other configurations of a folder
        for name in [*shards, *(file.name for file in folder.glob("*.json") if not file.name.endswith(".index.json"))]:
            target = Path(view, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to((folder / name).resolve())
        Path(view, index_file.name).write_text(json.dumps({**index, "weight_map": weight_map}))
        yield view


def _index_file(source: ModelSource) -> Path | None:
    folder = Path(source.path)
    if folder.is_dir():
        if (folder / "model.safetensors").exists():
            return None
        return next((folder / name for name in _INDEX_FILES if (folder / name).exists()), None)
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": source.revision, "_raise_exceptions_for_missing_entries": False}
    found = (cached_file(source.path, name, **options) for name in _INDEX_FILES)
    return next((Path(file) for file in found if file), None)


def _download(source: ModelSource, shards: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source.path, revision=source.revision, allow_patterns=[*shards, "*.json"]))


def _is_other_block(key: str, path: str, real: range) -> bool:
    """Whether a tensor of the checkpoint belongs to a block that isn't needed, with or without the base model's prefix."""
    _, _, short = path.partition(".")
    for prefix in {path, short} - {""}:
        found = re.match(rf"{re.escape(prefix)}\.(\d+)\.", key)
        if found:
            return int(found[1]) not in real
    return False


def _check_headers(files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as exc:
            raise ModelError(f"{file} {_what_is_wrong(file, exc)}") from exc


def _what_is_wrong(file: Path, exc: Exception) -> str:
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_GIT_LFS)) == _GIT_LFS:
            return "only points to the weights, which Git LFS keeps: run 'git lfs pull' in its folder"
    return f"is corrupt: {exc}"
