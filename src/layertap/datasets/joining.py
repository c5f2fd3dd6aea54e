"""The shares of several machines, read as one data set.

Each machine (`--shard i/n`) has a data set of its own in `shard-i-of-n`, with its own lock, manifest and resume: they need
no shared file system, and no two ever write to the same file. Put into one folder, they are one set.
"""

import re
from dataclasses import replace
from pathlib import Path

from layertap.datasets.lookup import Lookup, join_lookups, load_lookup
from layertap.datasets.manifest import MANIFEST_NAME, Manifest, read_manifest
from layertap.errors import ForeignError, MissingError, OptionError

_NAME = re.compile(r"shard-(\d+)-of-(\d+)")


def shard_folder(share: int, number: int) -> str:
    """The name of a share's folder."""
    return f"shard-{share}-of-{number}"


def refuse_share_beside_set(folder: Path) -> None:
    """Refuse to put a share into a data set: who opens that would never see it.

    Raises:
        OptionError: the folder is one.
    """
    if (folder / MANIFEST_NAME).exists():
        raise OptionError(
            f"{folder}: is a data set that wasn't split, so a share of another split has no place in it; choose another folder"
        )


def sets_in(folder: Path) -> list[Path]:
    """A data set itself, or those shares that are in a folder, be they all or not; empty where there are none."""
    if (folder / MANIFEST_NAME).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}") if _NAME.fullmatch(path.parent.name))


def find_shares(folder: Path) -> list[Path]:
    """List the shares in a folder, in order; empty where it is no folder of shares.

    Raises:
        MissingError: one isn't there.
        ForeignError: there are shares of different splits.
    """
    if (folder / MANIFEST_NAME).exists() or not folder.is_dir():
        return []
    found = {match[0]: int(match[2]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not found:
        return []
    numbers = sorted(set(found.values()))
    if len(numbers) > 1:
        raise ForeignError(f"{folder}: holds shares of splits into {' and '.join(map(str, numbers))}; keep one of them")
    names = [shard_folder(share, numbers[0]) for share in range(numbers[0])]
    missing = [name for name in names if name not in found]
    if missing:
        raise MissingError(
            f"{folder}: {', '.join(missing)} of {numbers[0]} shares missing; put them here, or open single shares"
        )
    return [folder / name for name in names]


def joined_manifest(shares: list[Path]) -> Manifest:
    """The manifest of all shares.

    Raises:
        ForeignError: they were made from different things.
    """
    manifests = [_of_the_whole(read_manifest(share)) for share in shares]
    for share, manifest in zip(shares, manifests, strict=True):
        differences = list(manifests[0].differences(manifest))
        if differences:
            raise ForeignError(
                f"{share}: was made from something else than {shares[0].name}: "
                + "; ".join(
                    line.replace("the data set", shares[0].name).replace("this run", share.name) for line in differences
                )
            )
    return manifests[0]


def joined_lookup(folder: Path, shares: list[Path]) -> Lookup:
    """The lookup of all shares.

    Raises:
        HiddenStatesError: the index of one is damaged.
    """
    lookups = [(share.name, load_lookup(share, read_manifest(share).id, use_cache=True)) for share in shares]
    return join_lookups(lookups, folder)


def _of_the_whole(manifest: Manifest) -> Manifest:
    return replace(manifest, rows=replace(manifest.rows, options={**manifest.rows.options, "shard": None}))
