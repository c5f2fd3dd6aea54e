"""The numbers of several ranges, one range after the other, without a loop over the numbers."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["numbers"]


def numbers(begins: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """`counts[i]` numbers from `begins[i]` on, for each i in turn."""
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    found: NDArray[np.int64] = np.repeat(begins, counts) + within
    return found
