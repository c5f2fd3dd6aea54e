"""Files mapped into memory without an open descriptor each.

Python's own `mmap` keeps a descriptor for every mapping (until 3.13 has no way around it): a data set of a few thousand
files would run into the usual limit of 1,024. So this calls mmap itself.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Without it, strict overcommit would charge every private mapping as if all of it were to be written to.
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_HINT_BYTES = 128 << 10  # the kernel reads no more ahead for one hint than the disk's largest request, and says nothing


class _Mapping:
    """Owns a mapping; NumPy arrays over it hold it alive."""

    def __init__(self, fd: int, size: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_PRIVATE | _MAP_NORESERVE, fd, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, False),
        }
        # not at exit: arrays may still be in use by then
        weakref.finalize(self, _libc.munmap, address, size).atexit = False


def map_private(fd: int, size: int) -> NDArray[np.uint8]:
    """Map a file privately: readable and writable, and what is written never reaches the file.

    Args:
        fd: an open file; may be closed afterwards.
        size: its bytes, more than 0.

    Returns:
        uint8 [size]; the mapping goes away with the last array over it.

    Raises:
        OSError: the kernel's reason.
    """
    return np.asarray(_Mapping(fd, size))


def will_need(part: NDArray[np.uint8]) -> None:
    """Let the kernel begin to read a part of a mapping, and nothing around it; doesn't wait.

    Args:
        part: uint8 [bytes], contiguous, of what `map_private` gave.
    """
    if not part.size:
        return
    begin = part.__array_interface__["data"][0]
    start, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + part.size
    for at in range(start, end, _HINT_BYTES):
        _libc.madvise(at, min(_HINT_BYTES, end - at), mmap.MADV_WILLNEED)  # only a hint: its failure is none
