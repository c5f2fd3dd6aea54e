"""One sequence in many is computed a second time, alone, and compared with the rows that are about to be saved.

What no check of single rows can see (rows of two requests swapped, a layer off by one, another sequence leaking in) shows here.
Right rows differ by rounding, and now and then a router that stands between two experts falls to the other side; so a sample fails
only if more than a fiftieth of its rows in some layer are far off.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from random import randrange

import torch
from torch import Tensor

from layertap.engines.fp8 import dequantize, is_quantized

__all__ = ["SpotCheck"]

_FAR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3, torch.uint8: 0.3}
_SHARE = 0.02


@dataclass(slots=True)
class SpotCheck:
    """Which sequences are computed again, and what came of it. `compare` may be called from any thread.

    Attributes:
        one_in: every so-manieth sequence, from a random one on; 0 is never.
        checked: how many were.
        failed: how many of them differed.
        worst: the largest median error of a layer so far.
    """

    one_in: int = 1000
    checked: int = 0
    failed: int = 0
    worst: float = 0.0
    _until_next: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def due(self) -> bool:
        """Whether the next sequence is one of them."""
        if self.one_in <= 0:
            return False
        if self._until_next < 0:
            self._until_next = randrange(self.one_in)
        self._until_next -= 1
        if self._until_next >= 0:
            return False
        self._until_next = self.one_in - 1
        return True

    def compare(
        self,
        rows: Tensor,
        again: Tensor,
        layers: tuple[int, ...],
        compute_dtype: torch.dtype,
        first_position: int = 0,
    ) -> str | None:
        """Compare [rows, layers, hidden] or fp8 slots; the reason why the sample can't be delivered, or None."""
        exact, given = (dequantize(part) if is_quantized(part) else part.double() for part in (again, rows))
        errors = (exact - given).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
        errors = errors.nan_to_num(nan=float("inf"))
        far = errors > max(_FAR.get(rows.dtype, 0.3), _FAR.get(compute_dtype, 0.3))
        too_many = far.sum(dim=0) > int(_SHARE * len(errors))
        wrong = bool(too_many.any())
        with self._lock:
            self.checked += 1
            self.failed += wrong
            self.worst = max(self.worst, float(errors.median(dim=0).values.max()))
        if not wrong:
            return None
        slot = int(too_many.nonzero()[0])
        row = int(errors[:, slot].argmax())
        return (
            f"the spot check computed the sequence again and got other rows: {int(far[:, slot].sum())} of {len(errors)} in "
            f"layer {layers[slot]}, worst at position {first_position + row} (relative error {float(errors[row, slot]):.2g})"
        )
