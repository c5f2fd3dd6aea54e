"""Rows of the latest requests, to find rows that were delivered to somebody else too. Writer processes may share the table."""

import mmap
import os
import struct
import threading

import numpy as np
import xxhash
from numpy.typing import NDArray

_CAPACITY = 1 << 16
_NAME_BYTES = 96
_RECORD = struct.Struct(f"<Qq{_NAME_BYTES}s")
_ENTRY_BYTES = _RECORD.size + 8
_KEY_BYTES = 8


def shared_memory() -> int:
    """A descriptor of memory for a table that several processes share."""
    fd = os.memfd_create("layertap-seen")
    os.ftruncate(fd, _CAPACITY * _ENTRY_BYTES)
    return fd


class SeenRows:
    """Some rows of the latest requests: digest -> the token that they were computed for. Thread-safe.

    A table of a fixed size, so that a server's memory doesn't grow for its first twenty thousand requests: a row has one place, and
    puts out the one that was there. Each entry has a digest of its own: one that another process is just writing counts as none.

    Args:
        fd: memory of `shared_memory`, or None for a table of this process's own.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._lock = threading.Lock()
        # untouched pages cost nothing
        self._map = mmap.mmap(-1 if fd is None else fd, _CAPACITY * _ENTRY_BYTES)

    def note(self, layer: int, row: NDArray[np.uint8], token_id: int, request_id: str) -> str | None:
        """Remember a row; return the request that has had the same bytes for another token."""
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(row).data, seed=layer)
        name = request_id.encode(errors="surrogatepass")[:_NAME_BYTES]
        record = _RECORD.pack(digest, token_id, name)
        place = digest % _CAPACITY * _ENTRY_BYTES
        with self._lock:
            entry = self._map[place : place + _ENTRY_BYTES]
            self._map[place : place + _ENTRY_BYTES] = record + _seal(record)
        if entry[:_KEY_BYTES] != record[:_KEY_BYTES] or entry[_RECORD.size :] != _seal(entry[: _RECORD.size]):
            return None
        _, seen_token, seen_name = _RECORD.unpack(entry[: _RECORD.size])
        if seen_token == token_id:
            return None
        return str(seen_name.rstrip(b"\0").decode(errors="replace"))


def _seal(record: bytes) -> bytes:
    return bytes(xxhash.xxh3_64_digest(record))
