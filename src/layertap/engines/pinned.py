"""Memory of the host that a GPU copies into without a bounce buffer, of exactly the size that is asked for.

torch's own pinned memory is rounded up to a power of two and is never given back to the system.
"""

import contextlib
import mmap
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["pin", "pinned_bytes", "unpin"]


def pin(memory: NDArray[np.uint8]) -> str | None:
    """Pin memory, until `unpin`; the reason if it can't be."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error) == 0:
        return None
    with contextlib.suppress(Exception):  # CUDA tells the next one who asks of this failure, too: that is here
        torch.zeros(1, device="cuda")
    return str(error)


def unpin(address: int) -> None:
    """Undo `pin`."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)


def pinned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """New pinned memory, which goes with the array.

    Raises:
        torch.OutOfMemoryError: it can't be had.
    """
    try:
        pages = mmap.mmap(-1, max(1, num_bytes))
    except OSError as exc:
        raise torch.OutOfMemoryError(f"{num_bytes} bytes of host memory can't be had: {exc}") from exc
    with contextlib.suppress(AttributeError, OSError):  # large pages are for speed only
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    torch.from_numpy(memory).zero_()  # several threads touch the pages, where the driver would alone
    reason = pin(memory)
    if reason is not None:
        raise torch.OutOfMemoryError(f"{num_bytes} bytes of host memory can't be pinned: {reason}")
    weakref.finalize(memory, unpin, memory.ctypes.data).atexit = False
    return memory
