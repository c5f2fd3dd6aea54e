"""The host ring's memory: anonymous, shared with the writer process by its descriptor, pinned where there is a GPU.

Behind the cells stands a stamp for each: the step in which the tap wrote it.
"""

import logging
import mmap
import os

import numpy as np
import torch
from numpy.typing import NDArray

from layertap.engines.pinned import pin, unpin

logger = logging.getLogger(__name__)


_STAMP_BYTES = 4


class SharedCells:
    """`num_cells` cells of `cell_bytes` bytes, and their stamps.

    Args:
        num_cells: of the ring.
        cell_bytes: bytes of one row of one layer.
        fd: an existing descriptor (in the writer process), or None to make the memory.
    """

    def __init__(self, num_cells: int, cell_bytes: int, fd: int | None = None) -> None:
        cells_bytes = num_cells * cell_bytes
        begin = -(-cells_bytes // _STAMP_BYTES) * _STAMP_BYTES
        size = max(1, begin + num_cells * _STAMP_BYTES)
        self.fd = os.memfd_create("layertap-ring") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.array: NDArray[np.uint8] = self._bytes[:cells_bytes].reshape(num_cells, cell_bytes)
        self.stamps: NDArray[np.int32] = np.frombuffer(self._map, np.int32, num_cells, begin)
        self._pinned = False

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The cells as a tensor [cells, hidden]."""
        return torch.from_numpy(self.array).view(dtype)

    def pin(self) -> None:
        """Let the GPU copy into it without a bounce buffer."""
        reason = pin(self._bytes)
        self._pinned = reason is None
        if reason is not None:
            logger.warning(
                "layertap: %d bytes can't be pinned (%s); copies from the GPU will be slower",
                self._bytes.nbytes,
                reason,
            )

    def unpin(self) -> None:
        """Undo `pin`."""
        if self._pinned:
            unpin(self._bytes.ctypes.data)
            self._pinned = False
