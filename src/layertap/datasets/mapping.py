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
