"""Room in the store: what is there, what running requests may still write, and the word "full" before anything is computed."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from layertap.capture.options import StoreOptions
from layertap.errors import StoreFullError
from layertap.files.paths import TEMP_SUFFIX


class StoreRoom:
    """Counts bytes of one store. Thread-safe.

    `max_storage_bytes` covers the files directly in the store's folder; they are counted once and kept up to date by those who add
    and remove, `recount` corrects what others did. `min_free_bytes` is asked of the file system of each target.

    Args:
        options: the store's.

    Attributes:
        counts_running: what running requests may still write counts as taken where `min_free_bytes` is checked. For servers; a
            batch that admits all its prompts at once would be refused for tokens that most of them never generate.
        make_room: called with the number of bytes that are missing before a request is refused; a reaper's chance.
    """

    def __init__(self, options: StoreOptions) -> None:
        self.folder = Path(os.path.abspath(options.shared_storage_path))
        self.quota_bytes = options.max_storage_bytes
        self.counts_running = False
        self.make_room: Callable[[int], None] | None = None
        self._min_free_bytes = options.min_free_bytes
        self._lock = threading.RLock()
        self._used_bytes: int | None = None
        self._reserved_bytes = 0
        self._reserved_elsewhere: dict[Path, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes in the store's files."""
        if self._used_bytes is None:
            self.recount()
        return self._used_bytes or 0

    @property
    def reserved_bytes(self) -> int:
        """The most that running requests may still write into the store."""
        return self._reserved_bytes

    def recount(self) -> int:
        """Count the store's files anew."""
        found = 0
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    try:
                        if entry.is_file(follow_symlinks=False) and not entry.name.endswith(TEMP_SUFFIX):
                            found += entry.stat(follow_symlinks=False).st_size
                    except OSError:
                        continue  # it vanished meanwhile
        except OSError:
            found = 0
        with self._lock:
            self._used_bytes = found
        return found

    def reserve(self, path: Path, num_bytes: int) -> "Reservation":
        """Set room aside.

        Raises:
            StoreFullError: there is none.
        """
        inside = path.parent == self.folder
        full = self._try(path, num_bytes, inside)
        if full and inside:
            if self.make_room is not None:
                self.make_room(full[0])
            else:
                self.recount()  # others remove files too: a reaper in another process, readers that clean up
            full = self._try(path, num_bytes, inside)
        if full:
            raise StoreFullError(full[1])
        return Reservation(self, path.parent, inside, num_bytes)

    def _try(self, path: Path, num_bytes: int, inside: bool) -> tuple[int, str] | None:
        with self._lock:
            full = self._missing(path, num_bytes, inside)
            if full is None:
                self._note(path.parent, num_bytes, inside)
        return full

    def _missing(self, path: Path, num_bytes: int, inside: bool) -> tuple[int, str] | None:
        folder = path.parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        reserved = 0
        if self.counts_running:
            reserved = self._reserved_bytes if inside else self._reserved_elsewhere.get(path.parent, 0)
        lacking = self._min_free_bytes - (free - reserved - num_bytes)
        if lacking > 0:
            return lacking, (
                f"no room for {num_bytes} bytes of hidden states: {folder} has {free} free, of which running requests may take "
                f"{reserved} and min_free_bytes keeps {self._min_free_bytes} (a lower max_tokens needs less)"
            )
        if inside and self.quota_bytes is not None:
            used = self.used_bytes
            lacking = used + self._reserved_bytes + num_bytes - self.quota_bytes
            if lacking > 0:
                return lacking, (
                    f"no room for {num_bytes} bytes of hidden states: {self.folder} holds {used}, running requests may add "
                    f"{self._reserved_bytes}, and max_storage_bytes allows {self.quota_bytes}"
                )
        return None

    def _note(self, folder: Path, num_bytes: int, inside: bool) -> None:
        if inside:
            self._reserved_bytes += num_bytes
            return
        left = self._reserved_elsewhere.get(folder, 0) + num_bytes
        if left > 0:
            self._reserved_elsewhere[folder] = left
        else:
            self._reserved_elsewhere.pop(folder, None)

    def removed(self, num_bytes: int) -> None:
        """Files of so many bytes were removed from the store."""
        with self._lock:
            if self._used_bytes is not None:
                self._used_bytes = max(0, self._used_bytes - num_bytes)

    def _settle(self, reservation: "Reservation", num_bytes: int) -> None:
        with self._lock:
            self._note(reservation.folder, -reservation.num_bytes, reservation.inside)
            if reservation.inside and self._used_bytes is not None:
                self._used_bytes += num_bytes


class Reservation:
    """Room that one capture may fill."""

    __slots__ = ("_room", "_settled", "folder", "inside", "num_bytes")

    def __init__(self, room: StoreRoom, folder: Path, inside: bool, num_bytes: int) -> None:
        self._room = room
        self.folder = folder
        self.inside = inside
        self.num_bytes = num_bytes
        self._settled = False

    def settle(self, num_bytes: int) -> None:
        """The capture ended with a file of so many bytes, 0 without one. Idempotent."""
        if not self._settled:
            self._settled = True
            self._room._settle(self, num_bytes)
