"""`layertap clean`: leftovers of killed writers."""

from pathlib import Path
from typing import Annotated

import typer

from layertap.cli.reporting import bytes_text, errors_explained, plural, say


def clean(
    folder: Annotated[Path, typer.Argument(help="A data set, or a storage of request files.", show_default=False)],
    ttl_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="In a storage, also published files older than this.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove leftovers of killed writers: temporary files, orphaned locks, shards that no index names.

    Finished samples are never touched, nor what is being written or read.
    """
    with errors_explained():
        from layertap.datasets.joining import sets_in
        from layertap.errors import OptionError

        if not folder.is_dir():
            raise OptionError(f"{folder}: there is no such folder")
        sets = sets_in(folder)
        if sets and ttl_seconds is not None:
            raise OptionError("ttl_seconds: samples of a data set don't expire; remove the folder")
        removed, freed = _clean_datasets(sets, dry_run) if sets else _clean_storage(folder, ttl_seconds, dry_run)
    for path in removed:
        typer.echo(path)
    verb = "would be removed" if dry_run else "removed"
    say(f"{plural(len(removed), 'file')} {verb}, {bytes_text(freed)}")


def _clean_datasets(folders: list[Path], dry_run: bool) -> tuple[list[Path], int]:
    from layertap.datasets.manifest import read_manifest
    from layertap.datasets.resume import leftovers, locked_folder

    found: list[Path] = []
    freed = 0
    for folder in folders:
        with locked_folder(folder):
            here = list(leftovers(folder, read_manifest(folder)))
            freed += sum(path.stat().st_size for path in here)
            if not dry_run:
                for path in here:
                    path.unlink()
        found += here
    return found, freed


def _clean_storage(folder: Path, ttl_seconds: float | None, dry_run: bool) -> tuple[list[Path], int]:
    from layertap.files.reap import reap

    found = reap(folder, ttl_seconds=ttl_seconds, dry_run=dry_run)
    return [*found.temporaries, *found.locks, *found.expired], found.freed_bytes
