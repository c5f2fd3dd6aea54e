"""What a power loss may leave of a folder, from a record of what was done to it.

While `PowerLoss(folder)` is active, every call that changes names or syncs (open, link, unlink, rename, mkdir, truncate, fsync,
pwrite, close) is noted together with what the folder held then. `crashes()` then gives the folders that a power loss at each of
those moments may leave, after the most pessimistic reading of POSIX: what was synced is there; of what was written to a file since
its last sync, each sector is old or new by itself, and the length is any that it has had; each name in a folder that wasn't synced
since is what it was or what it became, whatever happened to the other names.
"""

import builtins
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_SECTOR = 512
_CALLS = ("open", "close", "pwrite", "truncate", "ftruncate", "fsync", "link", "unlink", "replace", "rename", "mkdir")


@dataclass
class _File:
    """A file: contents since (and at) its last sync, the latest last."""

    contents: list[bytes] = field(default_factory=lambda: [b""])


@dataclass
class _Folder:
    """A folder: for each name, what it has stood for since the folder's last sync, the latest last; None: nothing."""

    names: dict[str, list[object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """One moment: the folder's state, and what had been promised by then."""

    number: int
    call: str
    root: object
    promised: frozenset[str]


class PowerLoss:
    """Record what happens below `folder` (which is empty and synced at first)."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._top = _Folder()
        self._known: dict[int, object] = {folder.stat().st_ino: self._top}
        self._promised: set[str] = set()
        self._lock = threading.RLock()
        self._real: dict[str, Callable] = {}
        self._last: object = None
        self.moments: list[Moment] = []

    def promise(self, name: str) -> None:
        """From now on a power loss must leave this intact."""
        with self._lock:
            self._promised.add(name)
            self._note("promise")

    def __enter__(self) -> "PowerLoss":
        for name in _CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._watched(name))
        self._real["io.open"] = io.open
        builtins.open = io.open = self._watched("io.open")
        return self

    def __exit__(self, *_exc: object) -> None:
        for name in _CALLS:
            setattr(os, name, self._real[name])
        builtins.open = io.open = self._real["io.open"]

    def _watched(self, name: str) -> Callable:
        real = self._real[name]

        def call(*args, **kwargs):
            with self._lock:
                if name == "fsync":
                    self._note("write")  # what reached the file past this record: Python's own buffers
                result = real(*args, **kwargs)
                self._note(name, args[0] if name == "fsync" else None)
                return result

        return call

    def _note(self, call: str, synced: int | None = None) -> None:
        self._look(self._root, self._top)
        if synced is not None:
            entry = self._known.get(os.fstat(synced).st_ino)
            if isinstance(entry, _File):
                entry.contents = entry.contents[-1:]
            elif isinstance(entry, _Folder):
                entry.names = {name: seen[-1:] for name, seen in entry.names.items() if seen[-1] is not None}
        state = (_fingerprint(self._top, {}), frozenset(self._promised))
        if state != self._last:  # many calls change nothing
            self._last = state
            copy = _copied(self._top, {})
            self.moments.append(Moment(len(self.moments), call, copy, frozenset(self._promised)))

    def _look(self, path: Path, folder: _Folder) -> None:
        found: dict[str, object] = {}
        with os.scandir(path) as entries:
            for item in entries:
                inode = item.inode()
                entry = self._known.get(inode)
                if item.is_dir(follow_symlinks=False):
                    if not isinstance(entry, _Folder):
                        entry = self._known[inode] = _Folder()
                    self._look(Path(item.path), entry)
                else:
                    fresh = item.name not in folder.names or folder.names[item.name][-1] is not entry
                    if not isinstance(entry, _File) or (fresh and not self._is_named(entry)):
                        entry = self._known[inode] = _File()  # also where an inode's number was used again
                    content = self._read(item.path)
                    if content != entry.contents[-1]:
                        entry.contents.append(content)
                found[item.name] = entry
        for name in folder.names.keys() | found.keys():
            seen = folder.names.setdefault(name, [None])
            if seen[-1] is not found.get(name):
                seen.append(found.get(name))

    def _read(self, path: str) -> bytes:
        with self._real["io.open"](path, "rb", buffering=0) as file:
            return file.read()

    def _is_named(self, entry: object) -> bool:
        def inside(folder: _Folder) -> bool:
            latest = [seen[-1] for seen in folder.names.values()]
            return any(one is entry or (isinstance(one, _Folder) and inside(one)) for one in latest)

        return inside(self._top)

    def crashes(self, where: Path, per_moment: int, seed: int = 0) -> Iterator[tuple[Moment, str, Path]]:
        """Make the folders; each is the caller's to remove.

        Yields:
            The moment, what was lost, and a folder.
        """
        rng = random.Random(seed)
        ways = ["nothing lost", "all unsynced lost", "names without data", "data without names"]
        for moment in self.moments:
            for way in ways + [f"random {n}" for n in range(per_moment)]:
                folder = where / f"{moment.number}-{way.replace(' ', '-')}"
                _build(moment.root, folder, way, rng)
                yield moment, way, folder


def said(moments: int, states: int) -> str:
    """What was tried, as the command that runs all faults reads it."""
    return f"{moments} moments, {states} states:"


def _fingerprint(entry: object, numbers: dict[int, int]) -> object:
    if isinstance(entry, _File):
        return numbers.setdefault(id(entry), len(numbers)), tuple(hash(content) for content in entry.contents)
    if isinstance(entry, _Folder):
        names = sorted(entry.names.items())
        return tuple((name, tuple(_fingerprint(one, numbers) for one in seen)) for name, seen in names)
    return entry


def _copied(entry: object, done: dict[int, object]) -> object:
    if id(entry) in done:
        return done[id(entry)]
    if isinstance(entry, _File):
        done[id(entry)] = _File(list(entry.contents))
    elif isinstance(entry, _Folder):
        copy = done[id(entry)] = _Folder()
        copy.names = {name: [_copied(one, done) for one in seen] for name, seen in entry.names.items()}
    else:
        return entry
    return done[id(entry)]


def _build(entry: object, path: Path, way: str, rng: random.Random) -> None:
    if isinstance(entry, _Folder):
        path.mkdir()
        for name, seen in entry.names.items():
            chosen = _chosen(seen, way in ("nothing lost", "names without data"), way, rng)
            if chosen is not None:
                _build(chosen, path / name, way, rng)
    elif isinstance(entry, _File):
        path.write_bytes(_content(entry.contents, way, rng))


def _chosen(seen: list[object], latest: bool, way: str, rng: random.Random) -> object:
    if way.startswith("random"):
        return rng.choice(seen)
    return seen[-1] if latest else seen[0]


def _content(contents: list[bytes], way: str, rng: random.Random) -> bytes:
    if not way.startswith("random"):
        return contents[-1] if way in ("nothing lost", "data without names") else contents[0]
    length = len(rng.choice(contents))
    sectors = []
    for start in range(0, length, _SECTOR):
        size = min(_SECTOR, length - start)
        sectors.append(rng.choice(contents)[start : start + size].ljust(size, b"\0"))
    return b"".join(sectors)
