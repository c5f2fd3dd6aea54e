"""Object storage: published files go to an fsspec URL, and their local copies away.

A file is in the object store completely or not at all (object stores publish on close; elsewhere it is renamed). Where it can't be
stored, `<name>.error` beside its place says why, as on a disk; the local file stays for HTTP until it expires.
"""

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from layertap.errors import OptionError
from layertap.files.paths import temporary_path
from layertap.files.reap import remove_idle
from layertap.serving.answers import object_url
from layertap.serving.book import Book, Entry

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.2


class Shipper:
    """Sends what the book calls ready.

    Args:
        base: URL of the folder.
        book: says when a file is ready or has failed, and is told where it went.
        count: called with "stored" or "failed".

    Raises:
        OptionError: the URL's protocol can't be had.
    """

    def __init__(self, base: str, book: Book, count: Callable[[str], None], num_threads: int = 8) -> None:
        self._base = base.rstrip("/")
        self._fs, self._folder = open_store(self._base)
        self._book = book
        self._count = count
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="layertap-ship")
        book.on_settled = self._take

    def _take(self, entry: Entry) -> None:
        self._pool.submit(self._ship, entry)

    def _ship(self, entry: Entry) -> None:
        target = f"{self._folder}/{entry.path.name}"
        try:
            if entry.state == "failed":
                reason = {"reason": entry.reason, "request_id": entry.name}
                self._attempt(lambda: self._fs.pipe_file(target + ".error", json.dumps(reason).encode()))
                return
            self._attempt(lambda: self._put(entry.path, target))
            self._book.note_shipped(entry.name, object_url(self._base, str(entry.path)))
            remove_idle(entry.path)
            self._count("stored")
        except Exception as exc:
            logger.exception("%s could not be stored at %s; it stays on this machine", entry.path, self._base)
            self._count("failed")
            reason = {"reason": f"it could not be stored: {exc}", "request_id": entry.name}
            try:
                self._fs.pipe_file(target + ".error", json.dumps(reason).encode())
            except Exception:
                logger.exception("and neither could the reason")

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
        """Send what is waiting, without further attempts where the store doesn't answer."""
        self._stop.set()
        self._pool.shutdown()


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
