"""From an id or a tag to a file and its state, as far as its caller may see it. Knows the store, not the engine.

The state is read from the store itself (the file, its lock, its error twin), so it survives a restart and is the same in
`layertap serve`, in vLLM's middleware and in `layertap serve-files` beside any server.
"""

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions
from layertap.errors import HiddenStatesError, MissingError, OptionError
from layertap.files.format import Header
from layertap.files.locks import LOCK_SUFFIX, is_held
from layertap.files.paths import error_path, target_path
from layertap.files.read import read_header
from layertap.files.reap import remove_idle
from layertap.files.tags import read_tag
from layertap.serving.identity import Caller, is_plain_id

State = Literal["ready", "writing", "failed", "missing", "shipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """Where a file stands.

    Attributes:
        name: the id.
        path: on this machine.
        state: "missing" where nobody knows of it (or it isn't the caller's), "shipped" where it is in object storage.
        reason: why it failed, or where it went.
        header: of a ready file.
    """

    name: str
    path: Path | None = None
    state: State
    reason: str | None = None
    header: Header | None = None


class Known(Protocol):
    """What a running server knows beside the store."""

    def where(self, name: str) -> Path | None:
        """The path of an id, where it isn't the usual one."""

    def failure(self, name: str) -> str | None:
        """Why the capture of an id failed, where that is known."""

    def shipped(self, name: str) -> str | None:
        """The URL of a file that went to object storage."""

    def ended(self, name: str) -> "Future[None] | None":
        """Resolved once the capture of an id has ended; None where that isn't known."""

    def note_fetched(self, name: str) -> None:
        """The file was delivered in whole."""

    def note_deleted(self, num_bytes: int) -> None:
        """The file was removed on its owner's behalf."""


class FileDesk:
    """Finds files for callers.

    Args:
        options: the store's.
        known: a running server, or None beside one.
    """

    def __init__(self, options: StoreOptions, known: Known | None = None) -> None:
        self._options = options
        self.known = known

    def look(self, name: str, caller: Caller) -> FileState:
        """Where the file of an id stands. Never raises for a bad id: that is missing."""
        if not is_plain_id(name) or not caller.may_see(name):
            return FileState(name=name, state="missing")
        path = self._path(name)
        if self.known is not None and (url := self.known.shipped(name)) is not None:
            return FileState(name=name, path=path, state="shipped", reason=url)
        if path.is_symlink():  # nothing of ours; whoever can make one must not make us read what it points to
            return FileState(name=name, state="missing")
        try:
            header = _header_or_none(path)
            if header is None:
                if _is_being_written(path):
                    return FileState(name=name, path=path, state="writing")
                header = read_header(path)  # it may have been published between the two looks; now nobody will any more
        except HiddenStatesError as exc:
            return self._without_file(name, path, exc)
        except OSError as exc:
            return FileState(name=name, path=path, state="failed", reason=exc.strerror or str(exc))
        writer = header.info.facts.get("request_id", name)
        if writer == name:
            return FileState(name=name, path=path, state="ready", header=header)
        if _is_being_written(path):  # and will replace another request's file
            return FileState(name=name, path=path, state="writing")
        return FileState(name=name, path=path, state="failed", reason=f"its file was replaced by request {writer}")

    def _without_file(self, name: str, path: Path, found: HiddenStatesError) -> FileState:
        if not isinstance(found, MissingError):
            return FileState(name=name, path=path, state="failed", reason=found.reason)
        reason = None if self.known is None else self.known.failure(name)
        return FileState(name=name, path=path, state="missing" if reason is None else "failed", reason=reason)

    def _path(self, name: str) -> Path:
        own = None if self.known is None else self.known.where(name)
        return own if own is not None else target_path(self._options, name, None)

    def tag(self, tag: str, caller: Caller) -> dict[str, Any] | None:
        """A tag's record with the state of each of its files, or None."""
        with contextlib.suppress(OptionError, OSError, ValueError):
            RequestOptions.parse({"tag": tag})  # a plain name
            record = read_tag(self._options.shared_storage_path, tag, caller.owner)
            if record is not None:
                for handle in record["handles"]:
                    handle["state"] = self.look(str(handle["hidden_states_id"]), caller).state
                return record
        return None

    def remove(self, found: FileState) -> bool:
        """Free a file that `look` found; False where it is being read or written."""
        if found.path is None:
            return True
        freed = remove_idle(found.path)
        if freed is None:
            return False
        if self.known is not None:
            self.known.note_deleted(freed)
        return True


def _header_or_none(path: Path) -> Header | None:
    with contextlib.suppress(HiddenStatesError):
        return read_header(path)
    return None


def _is_being_written(path: Path) -> bool:
    # where flock isn't to be had a living writer counts as a holder for ever, but an error twin says that it is done
    return is_held(path.with_name(path.name + LOCK_SUFFIX)) and not error_path(path).exists()
