"""Object storage: published files go to an fsspec URL, and their local copies away.

A file is in the object store completely or not at all (object stores publish on close; elsewhere it is renamed). Where it can't be
stored, `<name>.error` beside its place says why, as on a disk; the local file stays for HTTP until it expires.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from layertap.errors import OptionError
from layertap.files.paths import ERROR_SUFFIX, SUFFIX, safe_name, temporary_path
from layertap.files.reap import remove_idle

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.2


def is_object_store(handover: str) -> bool:
    """Whether the option `handover` names an object store."""
    return handover not in ("path", "http")


def object_url(base: str, name: str) -> str:
    """Where in an object store the file of a request goes: by its id, which is unique, also where clients choose paths."""
    return f"{base.rstrip('/')}/{safe_name(name)}{SUFFIX}"


def said_handle(handover: str, handle: Mapping[str, Any]) -> dict[str, Any]:
    """A handle as clients get it: in an object store the path is the object's URL."""
    said = dict(handle)
    if is_object_store(handover):
        said["hidden_states_url"] = said["hidden_states_path"] = object_url(handover, said["hidden_states_id"])
    return said


class Shipper:
    """Sends files that were published, and the reasons of those that weren't.

    Args:
        base: URL of the folder.
        freed: called with the bytes of each local copy that went.
        num_threads: files that are sent at once.

    Attributes:
        outcomes: files so far, "stored" and "failed".

    Raises:
        OptionError: the URL's protocol can't be had.
    """

    def __init__(self, base: str, freed: Callable[[int], None], num_threads: int = 8) -> None:
        self._base = base.rstrip("/")
        self._fs, self._folder = open_store(self._base)
        self._freed = freed
        self._lock = threading.Lock()
        self.outcomes = {"stored": 0, "failed": 0}
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="layertap-ship")

    def take(self, path: Path, name: str, reason: str | None) -> None:
        """Send the file of a request, or the reason why there is none, on another thread. Never raises."""
        try:
            self._pool.submit(self._ship, path, name, reason)
        except RuntimeError:  # closed: what is late is sent here and now
            self._ship(path, name, reason)

    def _ship(self, path: Path, name: str, reason: str | None) -> None:
        target = object_url(self._folder, name)
        try:
            if reason is not None:
                self._attempt(lambda: self._put_reason(target, name, reason))
                return
            self._attempt(lambda: self._put(path, target))
            self._count("stored")
        except Exception as exc:
            logger.exception("%s could not be stored at %s; it stays on this machine", path, self._base)
            self._count("failed")
            try:
                self._put_reason(target, name, f"it could not be stored: {exc}")
            except Exception:
                logger.exception("and neither could the reason")
        else:
            self._drop_copy(path)

    def _drop_copy(self, path: Path) -> None:
        try:
            self._freed(remove_idle(path) or 0)
        except OSError:
            logger.exception("%s was stored at %s; its copy here can't be removed", path, self._base)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def _put_reason(self, target: str, name: str, reason: str) -> None:
        self._fs.pipe_file(target + ERROR_SUFFIX, json.dumps({"reason": reason, "request_id": name}).encode())

    def _put(self, path: Path, target: str) -> None:
        atomic = not {"file", "local", "memory"} & set(_protocols(self._fs))
        if atomic:
            self._fs.put_file(str(path), target)
            return
        temporary = str(temporary_path(Path(target)))
        self._fs.makedirs(self._folder, exist_ok=True)
        self._fs.put_file(str(path), temporary)
        self._fs.mv(temporary, target)

    def _attempt(self, work: Callable[[], Any]) -> None:
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                work()
            except Exception as exc:
                if attempt == _ATTEMPTS or self._stop.wait(pause):
                    raise
                logger.warning("storing at %s failed (%s); trying again", self._base, exc)
                pause *= 2
            else:
                return

    def close(self) -> None:
        """Send what is waiting, without further attempts where the store doesn't answer. Idempotent."""
        self._stop.set()
        self._pool.shutdown()


def object_state(url: str) -> str | None:
    """Return "" where the object is there, the reason where it never will be, None where neither is known yet."""
    filesystem, path = open_store(url)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        return ""
    if filesystem.exists(path + ERROR_SUFFIX):
        return str(json.loads(filesystem.cat_file(path + ERROR_SUFFIX))["reason"])
    return None


def remove_object(url: str) -> None:
    """Free an object."""
    filesystem, path = open_store(url)
    filesystem.rm_file(path)


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it.

    Raises:
        OptionError: its protocol needs a package that isn't there, or is unknown.
    """
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise OptionError(f"{url}: object storage needs fsspec: pip install 'layertap[s3]'") from None
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as exc:
        raise OptionError(f"{url}: {exc}") from exc
    return filesystem, str(path).rstrip("/")


def _protocols(filesystem: Any) -> tuple[str, ...]:
    names = filesystem.protocol
    return (names,) if isinstance(names, str) else tuple(names)
