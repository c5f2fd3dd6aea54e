"""Where a transfer lands: in memory while it is small, in a temporary file once it isn't."""

import os
from tempfile import TemporaryFile
from types import TracebackType
from typing import BinaryIO, Self, cast

SMALL_BYTES = 1 << 20
_MAX_MEMORY_BYTES = 64 << 20


class Landing:
    """A file without a name; what is small never touches a disk."""

    def __init__(self) -> None:
        self._in_memory = hasattr(os, "memfd_create")
        self._file: BinaryIO = (
            os.fdopen(os.memfd_create("layertap"), "w+b", buffering=0)
            if self._in_memory
            else cast(BinaryIO, TemporaryFile(buffering=0))  # noqa: SIM115 - closed by close()
        )
        self.size = 0

    @property
    def is_small(self) -> bool:
        """Whether it is too small to be worth another thread."""
        return self._in_memory and self.size <= SMALL_BYTES

    def write(self, data: bytes) -> None:
        """Append."""
        if self._in_memory and self.size + len(data) > _MAX_MEMORY_BYTES:
            self._to_disk()
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(data)

    def _to_disk(self) -> None:
        disk = cast(BinaryIO, TemporaryFile(buffering=0))  # noqa: SIM115 - takes the other's place
        at = 0
        while at < self.size:
            at += os.sendfile(disk.fileno(), self._file.fileno(), at, self.size - at)
        disk.seek(self.size)
        self._file.close()
        self._file, self._in_memory = disk, False

    def clear(self) -> None:
        """Begin anew."""
        self._file.seek(0)
        self._file.truncate()
        self.size = 0

    def fileno(self) -> int:
        """For reading; the position doesn't matter."""
        return self._file.fileno()

    def close(self) -> None:
        """Free it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
