"""Go on where an earlier run stopped: what is done is known by index and checksum, never by the existence of a name."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layertap.datasets.index import load_entries, part_paths
from layertap.datasets.inputs import InputFile, InputRecord, Record
from layertap.datasets.manifest import MANIFEST_NAME, Manifest, read_manifest
from layertap.datasets.quarantine import set_aside_files, set_aside_part
from layertap.datasets.verify import PartReport, verify_parts
from layertap.datasets.writer import FILES_FOLDER, SHARDS_FOLDER, write_synced
from layertap.errors import HiddenStatesError, MissingError, OptionError, TargetExistsError
from layertap.files.locks import WriterLock
from layertap.files.paths import TEMP_SUFFIX, temporary_path
from layertap.files.publish import sync_folder

_LOCK_NAME = ".writer"


@dataclass(frozen=True, slots=True)
class Done:
    """The samples that are done, by their place in the input."""

    index: NDArray[np.int64]
    source_hash: NDArray[np.void]
    """16 bytes each."""

    def __len__(self) -> int:
        return len(self.index)

    def get(self, index: int) -> str | None:
        """Return the source hash of a finished sample, or None."""
        at = int(np.searchsorted(self.index, index))
        if at >= len(self.index) or self.index[at] != index:
            return None
        return str(self.source_hash[at].tobytes().hex())

    @property
    def end(self) -> int:
        """One past the last finished sample."""
        return int(self.index[-1]) + 1 if len(self.index) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A folder that is ready for more samples."""

    manifest: Manifest
    done: Done
    damaged: list[str]
    """What was found damaged and set aside, to be computed again."""


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer.

    Raises:
        OptionError: the folder can't be made.
        TargetExistsError: another job writes to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        reason = "a file is in its place" if isinstance(exc, FileExistsError | NotADirectoryError) else exc.strerror
        raise OptionError(f"{folder}: the folder can't be made: {reason}; give another one") from exc
    try:
        lock = WriterLock(folder / _LOCK_NAME, None, patience_seconds=0.0)
    except TargetExistsError as exc:
        raise TargetExistsError(
            exc.errno, f"another job is writing to this data set: {exc.strerror}", str(folder)
        ) from exc
    try:
        yield
    finally:
        lock.remove()


def prepare_folder(
    folder: Path,
    manifest: Manifest,
    *,
    check_rows: bool = True,
    on_part: Callable[[PartReport], None] | None = None,
) -> Prepared:
    """Make a folder ready for the samples of a run: a new one, or one that an earlier run left. The caller holds its lock.

    Leftovers of a killed writer are removed. Parts that don't match their checksums are moved to `damaged/`, and their
    samples count as not done.

    Args:
        folder: the data set.
        manifest: what this run would write.
        check_rows: check all rows of the finished samples; otherwise only index, headers and sizes.
        on_part: called for every part that was checked, for progress.

    Raises:
        OptionError: the folder holds something else, or rows that were made differently.
    """
    try:
        existing = read_manifest(folder)
    except MissingError:
        _refuse_strangers(folder)
        return _begin(folder, manifest, _temporaries(folder))
    if not part_paths(folder):  # a run that ended before it published anything binds nobody
        return _begin(folder, manifest, leftovers(folder, existing))
    existing.refuse_unless_same(manifest, folder)
    index: list[NDArray[np.int64]] = []
    hashes: list[NDArray[np.void]] = []
    damaged = []
    for report in verify_parts(folder, existing, rows=check_rows):
        if on_part is not None:
            on_part(report)
        if report.error is not None:
            damaged.append(str(report.error))
            set_aside_part(folder, report.path, report.done, str(report.error))
        else:
            index.append(np.array([entry.index for entry in report.done], np.int64))
            hashes.append(np.frombuffer(bytes.fromhex("".join(entry.source_hash for entry in report.done)), "V16"))
    for leftover in _temporaries(folder):
        leftover.unlink(missing_ok=True)
    unnamed = list(leftovers(folder, existing))
    if damaged:  # an index that couldn't be read may have named them
        set_aside_files(folder, unnamed)
    else:
        for leftover in unnamed:
            leftover.unlink(missing_ok=True)
    return Prepared(manifest=existing, done=_done(index, hashes), damaged=damaged)


def refuse_changed_input(records: InputFile, done: Done) -> None:
    """Compare the input with what the finished samples were made of, before anything is added.

    Raises:
        OptionError: a finished sample's input is another one now, or gone.
    """
    if not len(done):
        return
    seen = 0
    for record in records:
        seen = record.index + 1
        known = done.get(record.index)
        if known is not None and known != record.source_hash:
            raise OptionError(
                f"{record.where}: the input has changed: sample {record.index} of the data set was made from something "
                "else. Finished and new samples must not be mixed: write to another folder, or put the input back "
                "(adding to its end is fine)."
            )
        if seen >= done.end:
            return
    if records.limit is None:
        raise OptionError(
            f"{records.path}: the input has changed: it has {seen} prompts, the data set holds sample {done.end - 1} of it"
        )


def open_records(records: Iterable[Record], done: Done) -> Iterator[Record]:
    """Pass on the records that aren't done."""
    for record in records:
        if not isinstance(record, InputRecord) or done.get(record.index) is None:
            yield record


def _begin(folder: Path, manifest: Manifest, left: Iterable[Path]) -> Prepared:
    """Make a set that has no samples yet, without what an earlier run left."""
    for leftover in list(left):
        leftover.unlink(missing_ok=True)
    _write_manifest(folder, manifest)
    return Prepared(manifest=manifest, done=_done([], []), damaged=[])


def leftovers(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Find what killed writers left: temporary files, and files of rows that no index part names."""
    named: set[str] = set()
    for part in part_paths(folder):
        try:
            named.update(entry.file for entry in load_entries(part, manifest.id) if entry.file is not None)
        except HiddenStatesError:
            # an index that can't be read may name any file
            named.update(path.relative_to(folder).as_posix() for path in _row_files(folder))
    yield from _temporaries(folder)
    for path in _row_files(folder):
        if path.relative_to(folder).as_posix() not in named:
            yield path


def _temporaries(folder: Path) -> Iterator[Path]:
    yield from folder.glob(f".*{TEMP_SUFFIX}")
    for base in (SHARDS_FOLDER, FILES_FOLDER):
        yield from (folder / base).glob(f"**/.*{TEMP_SUFFIX}")


def _row_files(folder: Path) -> list[Path]:
    return [
        path
        for base in (SHARDS_FOLDER, FILES_FOLDER)
        for path in sorted((folder / base).glob("**/*.safetensors"))
        if not path.name.startswith(".")
    ]


def _done(index: list[NDArray[np.int64]], hashes: list[NDArray[np.void]]) -> Done:
    if not index:
        return Done(np.empty(0, np.int64), np.empty(0, "V16"))
    joined = np.concatenate(index)
    order = np.argsort(joined, kind="stable")
    return Done(joined[order], np.concatenate(hashes)[order])


def _refuse_strangers(folder: Path) -> None:
    strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if strangers:
        raise OptionError(
            f"{folder}: the folder isn't empty and no data set (it holds {strangers[0]!r}); give a new or empty folder"
        )


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    temporary = temporary_path(folder / MANIFEST_NAME)
    try:
        write_synced(temporary, manifest.to_json(), fsync=True)
        temporary.replace(folder / MANIFEST_NAME)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(folder)
    sync_folder(folder.parent)
