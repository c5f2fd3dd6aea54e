"""Folders that others wrote -> their files in a fixed order, each with a way to read it."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from layertap.datasets.importing_files import (
    Imported,
    is_layertap,
    read_layertap,
    read_speculators_pt,
    read_vllm,
    with_mask,
)
from layertap.datasets.manifest import MANIFEST_NAME
from layertap.errors import CorruptError, MissingError, OptionError
from layertap.files.paths import ERROR_SUFFIX, LOCK_SUFFIX, SUFFIX, TEMP_SUFFIX

SourceFormat: TypeAlias = Literal["files", "vllm", "speculators"]
SOURCE_FORMATS: tuple[SourceFormat, ...] = ("files", "vllm", "speculators")
_BESIDE = (LOCK_SUFFIX, ERROR_SUFFIX)
_ARROW_FILES = ("dataset_info.json", "state.json")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that is to become a sample. `name` is its path in the folder."""

    name: str
    path: Path
    read: Callable[[], Imported]


@dataclass(frozen=True, slots=True)
class Source:
    """What a folder holds."""

    files: list[SourceFile]
    strangers: list[str]
    """Files that are of no sample; they are left alone, and said."""


def open_source(folder: Path, format: SourceFormat) -> Source:
    """List a folder, in an order that depends on names only: digits count as numbers.

    Raises:
        OptionError: the folder isn't there, is a data set already, or holds nothing of the format.
    """
    if format not in SOURCE_FORMATS:
        raise OptionError(f"from: {format!r} is none of {', '.join(SOURCE_FORMATS)}")
    if not folder.is_dir():
        raise OptionError(f"{folder}: there is no such folder")
    if (folder / MANIFEST_NAME).exists():
        raise OptionError(f"{folder}: a data set of layertap already (it has a manifest.json): open_dataset reads it")
    names = sorted((path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()), key=_natural)
    if format == "speculators":
        source = _speculators(folder, names)
    else:
        source = _requests(folder, names, read_layertap if format == "files" else read_vllm)
    if not source.files:
        raise OptionError(f"{folder}: holds no files of the format {format!r}")
    return source


def _requests(folder: Path, names: Sequence[str], read: Callable[[Path], Imported]) -> Source:
    samples: dict[str, None] = {}  # a set with an order
    strangers = []
    for name in names:
        base = next((name.removesuffix(end) for end in _BESIDE if name.endswith(SUFFIX + end)), name)
        # what a killed writer left is none of ours, but it is said
        if base.endswith(SUFFIX) and not name.endswith(TEMP_SUFFIX):
            samples[base] = None
        else:
            strangers.append(name)
    return Source([SourceFile(name, folder / name, partial(read, folder / name)) for name in samples], strangers)


def _speculators(folder: Path, names: Sequence[str]) -> Source:
    if (folder / "state.json").exists():
        return _arrow(folder, names)
    samples = [name for name in names if re.fullmatch(r"(.*/)?data_\d+\.pt", name)]
    return Source(
        [SourceFile(name, folder / name, partial(read_speculators_pt, folder / name)) for name in samples],
        [name for name in names if name not in set(samples)],
    )


def _arrow(folder: Path, names: Sequence[str]) -> Source:
    """The folder that `speculators train --data-path` reads: a table, and a file of rows for each of its lines."""
    try:
        parts = [str(part["filename"]) for part in json.loads((folder / "state.json").read_text())["_data_files"]]
        table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(folder / part))).read_all() for part in parts)
        ids, masks = table.column("input_ids"), table.column("loss_mask")
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as exc:
        raise OptionError(f"{folder}: the table of speculators' format can't be read: {exc}") from exc
    files = [
        SourceFile(name, folder / name, partial(_read_line, folder / name, ids, masks, line))
        for line in range(len(table))
        for name in [f"hidden_states/hs_{line}{SUFFIX}"]
    ]
    known = {*_ARROW_FILES, *parts, *(file.name for file in files)}
    return Source(files, [name for name in names if name not in known])


def _read_line(path: Path, ids: pa.ChunkedArray, masks: pa.ChunkedArray, line: int) -> Imported:
    if not path.exists():
        raise MissingError(f"{path}: line {line} of the table has no file of rows")
    found = read_layertap(path) if is_layertap(path) else read_vllm(path)
    listed = np.array(ids[line].as_py(), np.int64)
    if not np.array_equal(listed, found.token_ids):
        raise CorruptError(f"{path}: its tokens aren't those of line {line} of the table")
    return with_mask(found, np.array(masks[line].as_py()), f"{path}: line {line} of the table")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
