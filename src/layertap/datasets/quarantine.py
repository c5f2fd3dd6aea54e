"""Parts of a data set that were found wrong are moved to `damaged/`: no reader sees them, and the next run makes them anew.

Nothing is deleted: each keeps a folder of its own there, with `reason.txt`.
"""

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from layertap.datasets.index import PART_SUFFIX, SampleEntry, load_entries
from layertap.datasets.lookup import load_lookup
from layertap.datasets.manifest import Manifest

DAMAGED_FOLDER = "damaged"
_REASON_NAME = "reason.txt"


def set_aside_part(folder: Path, part: Path, entries: Iterable[SampleEntry], reason: str) -> Path:
    """Move an index part and the files that it names.

    Args:
        folder: the data set, held by the caller (`resume.locked_folder`).
        part: the index part.
        entries: what it names, as far as it could be read.
        reason: what is wrong.

    Returns:
        Where they are now.
    """
    # the index part goes first: without it, its files are leftovers, whatever happens next
    stem = part.name.removesuffix(PART_SUFFIX)
    target = _new_folder(folder, stem)
    (target / _REASON_NAME).write_text(reason + "\n")
    part.replace(target / part.name)
    names = {folder / entry.file for entry in entries if entry.file is not None}
    names.add(part.with_name(f"{stem}.safetensors"))
    for path in names:
        with contextlib.suppress(FileNotFoundError):
            path.replace(target / path.name)
    return target


def set_aside_files(folder: Path, files: Iterable[Path]) -> None:
    """Move files that a part may have named whose index can't be read any more."""
    target: Path | None = None
    for path in files:
        if target is None:
            target = _new_folder(folder, "unnamed")
            (target / _REASON_NAME).write_text("no index names these files, and one that can't be read may have\n")
        path.replace(target / path.name)


def set_aside_samples(folder: Path, manifest: Manifest, wrong: Mapping[int, str]) -> Iterator[Path]:
    """Move the parts that hold these samples, with all their other samples; the caller holds the folder.

    Args:
        folder: the data set.
        manifest: its manifest.
        wrong: place of a sample in the input, and what is wrong with it; others are of another share.
    """
    lookup = load_lookup(folder, manifest.id)
    reasons: dict[Path, list[str]] = {}
    for index, reason in wrong.items():
        position = int(np.searchsorted(lookup.index, index))
        if position < len(lookup) and lookup.index[position] == index:
            reasons.setdefault(lookup.parts[int(lookup.part[position])], []).append(reason)
    for part, found in reasons.items():
        yield set_aside_part(folder, part, load_entries(part, manifest.id), "\n".join(found))


def _new_folder(folder: Path, stem: str) -> Path:
    target = folder / DAMAGED_FOLDER / stem
    if target.exists():  # an earlier one of that name stays
        target = target.with_name(f"{stem}.{secrets.token_hex(4)}")
    target.mkdir(parents=True)
    return target
