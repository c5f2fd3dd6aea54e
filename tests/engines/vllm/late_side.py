"""A device on the CPU whose copies to the host come as late as they may, and the digests that its kernel would compute."""

import threading
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layertap.engines import digests


class LateMark:
    """A moment of the side stream, which comes only when somebody waits for it; one of the main stream has come at once."""

    def __init__(self, side):
        self._side = side
        self._waiting = []

    def record(self):
        if self._side.is_current:
            self._waiting, self._side.launched = self._side.launched, []

    def query(self):
        return not self._waiting

    def synchronize(self):
        with self._side.lock:
            waiting, self._waiting = self._waiting, []
            for copy in waiting:
                copy()


class _Defer(TorchDispatchMode):
    def __init__(self, side):
        super().__init__()
        self._side = side

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self._side.launched.append(lambda: target.copy_(source))
            self._side.read.add(_address(source))
            return target
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self._side.made.add(_address(found))
        return found


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


class LateSide:
    """See the module; `layertap.engines.vllm.side.Side`."""

    def __init__(self):
        self.launched = []
        self.read, self.made, self.kept = set(), set(), set()
        self.arena = set()
        self.is_current = False
        self.lock = threading.RLock()

    def mark(self, *, blocking=False):
        return LateMark(self)

    @contextmanager
    def behind(self, mark):
        self.is_current = True
        try:
            with _Defer(self):
                yield
        finally:
            self.is_current = False
        assert not self.launched, "launched, and nobody can wait for it"
        assert self.read <= self.made | self.kept | self.arena, (
            "what the main stream made may be freed before it was read"
        )
        for addresses in (self.read, self.made, self.kept):
            addresses.clear()

    def pinned(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def keep(self, tensor):
        self.kept.add(_address(tensor))

    def owns(self, *tensors):
        """These live as long as the tap."""
        self.arena.update(map(_address, tensors))


def start_digests(rows, token_ids):
    """As `layertap.engines.digests.start_digests`, with NumPy: XXH3's accumulators after all stripes of a row."""
    raw = rows.contiguous().view(torch.uint8).reshape(rows.shape[0], -1).numpy()
    words = raw.view(np.uint64)
    seeds = token_ids.numpy().astype(np.uint64)
    secret = np.empty((len(words), len(digests._WORDS)), np.uint64)
    secret[:, 0::2], secret[:, 1::2] = digests._WORDS[0::2] + seeds[:, None], digests._WORDS[1::2] - seeds[:, None]
    secret_bytes = secret.view(np.uint8)
    low, crossed = np.uint64(0xFFFFFFFF), np.arange(8) ^ 1
    found = np.zeros((len(words), 9), np.uint64)
    found[:, :8] = np.array(digests._FIRST, np.uint64)

    def mix(stripe, offset):
        key = np.ascontiguousarray(secret_bytes[:, offset : offset + 64]).view(np.uint64)
        mixed = stripe ^ key
        found[:, :8] += stripe[:, crossed] + (mixed & low) * (mixed >> np.uint64(32))

    with np.errstate(over="ignore"):
        for stripe in range((words.shape[1] - 1) // 8):
            mix(words[:, stripe * 8 : stripe * 8 + 8], 8 * (stripe % 16))
            if stripe % 16 == 15:
                acc = found[:, :8]
                acc ^= acc >> np.uint64(47)
                acc ^= np.ascontiguousarray(secret_bytes[:, 128:192]).view(np.uint64)
                acc *= np.uint64(0x9E3779B1)
        mix(words[:, -8:], 121)
    found[:, 8] = ~torch.isfinite(rows.float()).flatten(1).all(1).numpy()
    return torch.from_numpy(found.view(np.int64))
