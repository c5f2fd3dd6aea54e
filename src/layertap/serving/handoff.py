"""From an id or a tag to a file and its state, as far as its caller may see it. Knows the store, not the engine.

The state is read from the store itself (the file, its lock, its error twin), so it survives a restart and is the same in
`layertap serve`, in vLLM's middleware and in `layertap serve-files` beside any server.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions
from layertap.errors import HiddenStatesError, MissingError, OptionError, TargetExistsError
from layertap.files.format import Header
from layertap.files.locks import is_held, lock_path
from layertap.files.paths import error_path, target_path
from layertap.files.read import read_header
from layertap.files.reap import remove_idle
from layertap.files.tags import read_tag
from layertap.serving.api_errors import ApiError
from layertap.serving.identity import Caller, is_plain_id
from layertap.writing.shipping import is_object_store, object_state, object_url, remove_object, said_handle

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


class KnownFile(Protocol):
    """What a running server knows of one file beside the store."""

    @property
    def path(self) -> Path:
        """Where it is, also where that isn't the usual place."""

    @property
    def reason(self) -> str | None:
        """Why there is none, where that is known."""

    @property
    def done(self) -> "Future[None] | None":
        """Resolved once its capture has ended; None where that isn't known."""


class Known(Protocol):
    """A running server's book of files."""

    def get(self, name: str) -> KnownFile | None:
        """The file of an id."""

    def note_fetched(self, name: str) -> None:
        """It was delivered in whole."""


class FileDesk:
    """Finds files for callers.

    Args:
        options: the store's.
        known: a running server's, or None beside one.
        deleted: called with the bytes of what was removed on its owner's behalf.
    """

    def __init__(
        self, options: StoreOptions, known: Known | None = None, deleted: Callable[[int], None] = lambda _bytes: None
    ) -> None:
        self._options = options
        self._known = known
        self._deleted = deleted

    def look(self, name: str, caller: Caller) -> FileState:
        """Where the file of an id stands. Never raises for a bad id: that is missing."""
        if not is_plain_id(name) or not caller.may_see(name):
            return FileState(name=name, state="missing")
        path = self._path(name)
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
        if is_object_store(self._options.handover) and (state := self._in_object_store(name, path)) is not None:
            return state
        entry = self._entry(name)
        reason = None if entry is None else entry.reason
        return FileState(name=name, path=path, state="missing" if reason is None else "failed", reason=reason)

    def _in_object_store(self, name: str, path: Path) -> FileState | None:
        url = object_url(self._options.handover, name)
        try:
            reason = object_state(url)
        except Exception as exc:
            raise ApiError(
                503, f"the object store doesn't answer: {exc}", code="object_store", headers={"retry-after": "1"}
            ) from exc
        if reason is None:
            return None
        return FileState(name=name, path=path, state="failed" if reason else "shipped", reason=reason or url)

    def _path(self, name: str) -> Path:
        entry = self._entry(name)
        return target_path(self._options, name, None) if entry is None else entry.path

    def _entry(self, name: str) -> KnownFile | None:
        return None if self._known is None else self._known.get(name)

    def ended(self, name: str) -> "Future[None] | None":
        """Resolved once the capture of an id has ended; None where that isn't known."""
        entry = self._entry(name)
        return None if entry is None else entry.done

    def note_fetched(self, name: str) -> None:
        """The file of an id was delivered in whole."""
        if self._known is not None:
            self._known.note_fetched(name)

    def tag(self, tag: str, caller: Caller) -> dict[str, Any] | None:
        """A tag's record with the state of each of its files, or None."""
        with contextlib.suppress(OptionError, OSError, ValueError):
            RequestOptions.parse({"tag": tag})  # a plain name
            record = read_tag(self._options.shared_storage_path, tag, caller.owner)
            if record is not None:
                handles = [said_handle(self._options.handover, handle) for handle in record["handles"]]
                for handle in handles:
                    handle["state"] = self.look(str(handle["hidden_states_id"]), caller).state
                return {**record, "handles": handles}
        return None

    def remove(self, found: FileState) -> bool:
        """Free a file that `look` found; False where it is being read or written."""
        if found.path is None:
            return True
        if found.state == "shipped":
            remove_object(object_url(self._options.handover, found.name))
            return True
        freed = remove_idle(found.path)
        if freed is None:
            return False
        self._deleted(freed)
        return True


def refuse_anothers_file(path: Path, caller: Caller) -> None:
    """Keep a client from replacing what isn't a request's of its key.

    Raises:
        TargetExistsError: it isn't.
    """
    if caller.owner and os.path.lexists(path):
        header = _header_or_none(path)
        if header is None or not caller.may_see(header.info.facts.get("request_id", "")):
            raise TargetExistsError(f"{path} exists already, and isn't one of this API key's; take another path")


def _header_or_none(path: Path) -> Header | None:
    with contextlib.suppress(HiddenStatesError):
        return read_header(path)
    return None


def _is_being_written(path: Path) -> bool:
    # where flock isn't to be had a living writer counts as a holder for ever, but an error twin says that it is done
    return is_held(lock_path(path)) and not error_path(path).exists()
