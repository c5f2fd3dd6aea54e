"""The tap: copies the rows of the layers asked for out of a running forward, and ends it at the deepest one.

A pre-hook on block L sees the stream that enters it; a hook on the last block sees what it puts out. Rows go straight to
their place in an arena [rows, layers, hidden], in the dtype that is saved (fp8: as slots of bytes, see `engines.fp8`). On the
CPU the arena is the buffer that the writer reads, so the tap is the only copy before the file's pages. On CUDA a device arena
takes the rows at memory speed and one copy on a side stream brings it to pinned memory while the next batch runs.

Arenas are used again: before each batch every row of every layer is marked, and a row that the tap didn't write since is a NaN,
which the checks of rows refuse.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from layertap.capture.residual import Residual
from layertap.engines.digests import can_digest, finish_digests, start_digests
from layertap.engines.fp8 import put
from layertap.engines.pinned import pinned_bytes
from layertap.engines.ranges import numbers
from layertap.engines.transformers.copies import to_device
from layertap.errors import UnsupportedModelError
from layertap.writing.checks import MARK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

__all__ = ["Arena", "Arenas", "EarlyExit", "Piece", "Tap", "run_to_exit"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_LEAST_ARENAS = 2
_MOST_PIECES = 8
"""With more pieces (the last row of each of many prompts) one gather is cheaper than many copies."""


class EarlyExit(BaseException):
    """Ends a forward whose deepest layer has been taken. Not an Exception: no model may swallow it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of the stream that are wanted: `stream[batch, begin:end]` goes to arena rows from `row` on."""

    batch: int
    begin: int
    end: int
    row: int


class Arena:
    """Room for the rows of one batch; handed out again once every share of it has been released.

    Attributes:
        rows: [rows, layers, hidden] where the tap puts rows.
    """

    def __init__(self, owner: Arenas, nbytes: int, device: torch.device) -> None:
        self._owner = owner
        # the device first: where its memory isn't enough, none of the host's has been pinned
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._host = torch.from_numpy(pinned_bytes(nbytes)) if device.type == "cuda" else self._device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._shares = 0
        self._lock = threading.Lock()
        self.rows: Tensor = self._device
        self._flat: NDArray[np.uint8] = self._host.numpy()
        self._bytes: NDArray[np.uint8] = self._flat
        self._ids: NDArray[np.int64] | None = None
        self._accumulators: Tensor | None = None
        self._on_device: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Capacity."""
        return self._host.numel()

    def shape(self, rows: int, layers: int, hidden: int, dtype: torch.dtype) -> None:
        """Lay the arena out for a batch."""
        used = rows * layers * hidden * dtype.itemsize
        self.rows = self._device[:used].view(dtype).view(rows, layers, hidden)
        self._used = used
        self._bytes = self._flat[:used].reshape(rows, layers, hidden * dtype.itemsize)
        marks = self.rows.view(_INTEGERS[dtype.itemsize])[:, :, : MARK_BYTES // dtype.itemsize]
        marks.fill_(255 if dtype.itemsize == 1 else -1)

    def fetch(self, stream: torch.cuda.Stream | None, token_ids: NDArray[np.int64]) -> None:
        """Start the copy to the host, and on the device the rows' digests, after the kernels that filled the arena.

        Args:
            stream: a side stream; None on the CPU, where there is nothing to fetch.
            token_ids: int64 [rows], the token of each row.
        """
        self._ids, self._accumulators, self._on_device = token_ids, None, ()
        if self._event is None or stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            if can_digest(self.rows):
                seeds = to_device(torch.from_numpy(token_ids), self.rows.device)
                accumulators = start_digests(self.rows, seeds)
                self._accumulators = torch.empty(accumulators.shape, dtype=torch.int64, pin_memory=True)
                self._accumulators.copy_(accumulators, non_blocking=True)
                self._on_device = (
                    seeds,
                    accumulators,
                )  # kept until the event: the allocator knows only the main stream
            self._host[: self._used].copy_(self._device[: self._used], non_blocking=True)
            self._event.record(stream)

    def wait(self) -> None:
        """Return once the rows are on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._on_device = ()

    def digests(self) -> tuple[NDArray[np.uint64], NDArray[np.bool_]] | None:
        """The rows' digests and which rows are finite, once `wait` has returned, where the device has computed them."""
        if self._accumulators is None or self._ids is None:
            return None
        row_bytes = self._bytes.shape[1] * self._bytes.shape[2]
        found = self._accumulators.numpy().view(np.uint64)
        return finish_digests(found, self._ids, row_bytes), found[:, -1] == 0

    def share(self, begin: int, end: int) -> tuple[NDArray[np.uint8], Callable[[], None]]:
        """Lend rows begin .. end - 1 as bytes [n, layers, hidden * itemsize], and the call that gives them back."""
        with self._lock:
            self._shares += 1
        done = threading.Lock()

        def release() -> None:
            if done.acquire(blocking=False):
                self.give_back()

        return self._bytes[begin:end], release

    def host_rows(self, begin: int, end: int) -> Tensor:
        """Rows begin .. end - 1 [n, layers, hidden] on the host, once `wait` has returned."""
        return torch.from_numpy(self._bytes[begin:end]).view(self.rows.dtype)

    def hold(self) -> None:
        """Keep the arena for the engine itself until `give_back`."""
        with self._lock:
            self._shares += 1

    def give_back(self) -> None:
        """Return one share; the last makes the arena free."""
        with self._lock:
            self._shares -= 1
            free = self._shares == 0
        if free:
            self._owner.take_back(self)


class Arenas:
    """A few arenas, allocated as they are needed and reused; asking for one waits until the writer has caught up.

    Args:
        device: of the model.
        count: arenas for one user; fewer where the memory isn't enough.
        limit_bytes: of all together; more only where each user would have but one. None is any number.
    """

    def __init__(self, device: torch.device, count: int = 2, limit_bytes: int | None = None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._free: list[Arena] = []
        self._made = 0
        self._made_bytes = 0
        self._count = count
        self._users = 0
        self._changed = threading.Condition()

    @contextmanager
    def one_more_user(self) -> Iterator[None]:
        """Each user beyond the first may have one arena more: it may keep one for as long as nobody takes its results."""
        with self._changed:
            self._users += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                while self._free and self._made > self._allowed:
                    self._drop(self._free[-1])

    @property
    def _allowed(self) -> int:
        return self._count + max(self._users - 1, 0)

    @property
    def _others_come_back(self) -> bool:
        """Each user may keep one that nobody takes the results of; any more than those are being written."""
        return self._made > self._users

    def _may_make(self, nbytes: int) -> bool:
        if self._made >= self._allowed:
            return False
        fits = self._limit_bytes is None or self._made_bytes + nbytes <= self._limit_bytes
        return fits or not self._others_come_back

    def acquire(self, rows: int, layers: int, hidden: int, dtype: torch.dtype) -> Arena:
        """Take an arena with room for these rows; its user holds one share of it."""
        nbytes = rows * layers * hidden * dtype.itemsize
        size, arena = _rounded(nbytes), None
        while arena is None:
            with self._changed:
                while (arena := self._take_free(nbytes)) is None and not self._may_make(size):
                    if not self._free:
                        self._changed.wait()
                if arena is None:
                    self._made, self._made_bytes = self._made + 1, self._made_bytes + size
            if arena is None:  # without the lock: pinning gigabytes takes a while, in which others give theirs back
                arena = self._make(size)
        arena.shape(rows, layers, hidden, dtype)
        arena.hold()
        return arena

    def _make(self, nbytes: int) -> Arena | None:
        """A new arena, counted already. None where there is no memory for it, but another one will come back."""
        try:
            return Arena(self, nbytes, self._device)
        except BaseException as exc:
            with self._changed:
                self._made, self._made_bytes = self._made - 1, self._made_bytes - nbytes
                do_without = self._others_come_back and isinstance(exc, RuntimeError)
                if do_without:
                    self._count = max(1, self._made - max(self._users - 1, 0))
                self._changed.notify_all()
            if not do_without:
                raise
            logger.warning("no memory for one more arena of %d bytes: %d are used", nbytes, self._made)
            return None

    def _take_free(self, nbytes: int) -> Arena | None:
        """A free arena that is large enough; one that is too small is dropped, before its successor needs the memory."""
        if not self._free:
            return None
        arena = max(self._free, key=lambda a: a.nbytes)
        if arena.nbytes >= nbytes:
            self._free.remove(arena)
            return arena
        self._drop(arena)
        return None

    def _drop(self, arena: Arena) -> None:
        self._free.remove(arena)
        self._made, self._made_bytes = self._made - 1, self._made_bytes - arena.nbytes

    def shrink(self) -> bool:
        """Give up all arenas that no user holds, when they are written, and have fewer from now on; False if two are left."""
        with self._changed:
            if self._count <= _LEAST_ARENAS:
                return False
            self._count = max(_LEAST_ARENAS, self._count // 2)
            while self._free or self._others_come_back:
                while self._free:
                    self._drop(self._free[-1])
                if self._others_come_back:
                    self._changed.wait()
            return True

    def take_back(self, arena: Arena) -> None:
        """Called by the arena when its last share is back."""
        with self._changed:
            self._free.append(arena)
            if self._made > self._allowed:
                self._drop(arena)
            self._changed.notify_all()


def _rounded(nbytes: int) -> int:
    """A little more, so that a batch that is a little larger than those before needn't have arenas of its own."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


@dataclass(slots=True)
class _Target:
    """Where the rows of the running forward go, and how far it has come."""

    rows: Tensor
    pieces: Sequence[Piece]
    shape: tuple[int, int]
    slots: dict[int, int]
    deepest: int
    next_layer: int = 0
    index: Tensor | None = None

    def copy(self, stream: Tensor, slot: int) -> None:
        """Put the wanted rows of a stream [batch, tokens, hidden] into a slot."""
        if len(self.pieces) <= _MOST_PIECES:
            for piece in self.pieces:
                place = self.rows[piece.row : piece.row + piece.end - piece.begin, slot]
                put(place, stream[piece.batch, piece.begin : piece.end])
            return
        if self.index is None:
            begins = np.array([piece.batch * self.shape[1] + piece.begin for piece in self.pieces])
            counts = np.array([piece.end - piece.begin for piece in self.pieces])
            self.index = to_device(torch.from_numpy(numbers(begins, counts)), stream.device)
        put(self.rows[:, slot], stream.reshape(-1, stream.shape[-1]), self.index)


class Tap:
    """Hooks on all blocks of a private view, idle unless a forward runs inside `into`.

    Args:
        blocks: the blocks of the view, in order.
        residual: picks the stream [batch, tokens, hidden] out of what a block takes or gives.
    """

    def __init__(self, blocks: Sequence[nn.Module], residual: Residual) -> None:
        self._residual = residual
        self._target: _Target | None = None
        self._handles = [
            block.register_forward_pre_hook(self._entering(layer), with_kwargs=True)
            for layer, block in enumerate(blocks)
        ]
        self._handles.append(blocks[-1].register_forward_hook(self._leaving(len(blocks)), with_kwargs=True))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def into(
        self, rows: Tensor, layers: Sequence[int], pieces: Sequence[Piece], shape: tuple[int, int]
    ) -> Iterator[None]:
        """Copy what a forward in this context computes to `rows`, and end it at the deepest layer.

        Args:
            rows: [rows, layers, hidden].
            layers: ids; slot i of `rows` takes layers[i].
            pieces: which rows of the stream go where.
            shape: batch and tokens of the input; a stream of another shape has rows that belong to no token of it.
        """
        slots = {layer: slot for slot, layer in enumerate(layers)}
        self._target = _Target(rows, pieces, shape, slots, max(layers))
        try:
            yield
        finally:
            self._target = None

    def _entering(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._target is not None:
                self._take(self._target, layer, lambda: self._residual.entering(args, kwargs))

        return hook

    def _leaving(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._target is not None:
                self._take(self._target, layer, lambda: self._residual.leaving(output))

        return hook

    def _take(self, target: _Target, layer: int, stream_here: Callable[[], Tensor]) -> None:
        if layer < target.next_layer:
            raise UnsupportedModelError(f"block {layer} ran twice in one forward, so its layer id has two meanings")
        # A block that the model skips (cross attention without an image) is entered by what enters the next one that runs.
        wanted = [target.slots[skipped] for skipped in range(target.next_layer, layer + 1) if skipped in target.slots]
        target.next_layer = layer + 1
        if wanted:
            stream = stream_here()
            if stream.shape[:2] != target.shape:
                raise UnsupportedModelError(
                    f"layer {layer} carries a stream of shape {tuple(stream.shape)} for an input of {target.shape}: its rows "
                    "don't belong to the tokens one to one"
                )
            for slot in wanted:
                target.copy(stream, slot)
        if layer >= target.deepest:
            raise EarlyExit


def run_to_exit(forward: Callable[[], Any]) -> None:
    """Run a tapped forward to its early exit.

    Raises:
        RuntimeError: it came to its end: a block that was asked for never ran.
    """
    try:
        forward()
    except EarlyExit:
        return
    raise RuntimeError("the forward ended before the deepest layer was reached")
