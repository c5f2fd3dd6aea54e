"""Check a data set against its checksums: index, headers, rows, token ids, and that samples fill their files exactly."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from layertap.datasets.index import SampleEntry, load_entries, part_paths
from layertap.datasets.manifest import Manifest
from layertap.datasets.shards import MappedShard
from layertap.datasets.writer import file_info
from layertap.errors import CorruptError, ForeignError, HiddenStatesError
from layertap.files.format import FileInfo, Packed
from layertap.files.read import read_header


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What was found in one index part and the files that it names."""

    path: Path
    entries: list[SampleEntry]
    num_bytes: int = 0
    error: HiddenStatesError | None = None

    @property
    def done(self) -> list[SampleEntry]:
        """The samples, without the inputs that failed."""
        return [entry for entry in self.entries if entry.file is not None]


def verify_parts(folder: Path, manifest: Manifest, *, rows: bool = True) -> Iterator[PartReport]:
    """Check part by part. Damage is reported, not raised.

    Args:
        folder: the data set.
        manifest: its manifest.
        rows: check every row; otherwise only index, headers and sizes.
    """
    for path in part_paths(folder):
        entries: list[SampleEntry] = []
        try:
            entries = load_entries(path, manifest.id)
            num_bytes = sum(_verify_file(folder, name, group, manifest, rows) for name, group in _by_file(entries))
        except HiddenStatesError as exc:
            yield PartReport(path=path, entries=entries, error=exc)
        else:
            yield PartReport(path=path, entries=entries, num_bytes=num_bytes)


def _by_file(entries: list[SampleEntry]) -> Iterator[tuple[str, list[SampleEntry]]]:
    groups: dict[str, list[SampleEntry]] = {}
    for entry in entries:
        if entry.file is not None:
            groups.setdefault(entry.file, []).append(entry)
    yield from groups.items()


def _verify_file(folder: Path, name: str, entries: list[SampleEntry], manifest: Manifest, rows: bool) -> int:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ForeignError(f"{path}: the index names a file outside of the data set")
    start, end = -1, 0
    for entry in entries:
        if entry.before is None and entry.row == start and entry.row + entry.tokens <= end:
            continue  # the beginning of the sample before, as sets have it that were made without `before`
        if entry.row != end or entry.own_tokens < 0 or any(stop > end for _, stop in entry.before or ()):
            raise CorruptError(
                f"{path}: sample {entry.index} lies in rows {list(entry.spans)}, the one before ends at {end}"
            )
        start, end = entry.row, end + entry.own_tokens
    info = read_header(path).info
    expected = file_info(manifest)
    if _comparable(info) != _comparable(expected) or info.num_rows != end:
        raise ForeignError(
            f"{path}: not the file that the index means: layers {list(info.layers)} {info.dtype} of "
            f"{info.hidden_size}, {info.num_rows} rows, data set {info.facts.get('dataset')}; expected layers "
            f"{list(expected.layers)} {expected.dtype} of {expected.hidden_size}, {end} rows, data set {manifest.id}"
        )
    if rows:
        shard = MappedShard(path, info, end)
        for entry in entries:
            shard.read(entry.spans, str(entry.checksum))
    return path.stat().st_size


def _comparable(info: FileInfo) -> FileInfo:
    facts = {"dataset": info.facts.get("dataset", "")}
    packed = None if info.packed is None else Packed()
    return replace(info, num_rows=0, prompt_len=0, num_tokens=0, facts=facts, packed=packed)
