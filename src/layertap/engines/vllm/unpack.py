"""From steps to rows: the thread that waits for each step's copy and cuts it into chunks, in order.

The engine's thread only queues. Orders, steps and endings keep their order, so a request ends behind its last rows. A failure
belongs to one request; it never reaches the engine. Who gets the rows is a subclass's: the collector of this process, or another
pipeline stage.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from layertap.assembly import Rows
from layertap.engines.bank import Bank, Gathered
from layertap.engines.fp8 import put, storage
from layertap.engines.vllm.messages import Finish, Order, PrefixNews, Reuse
from layertap.engines.vllm.prefix_rows import PrefixRows
from layertap.engines.vllm.rowmap import SKIP, Chunk, Want
from layertap.engines.vllm.tap import Step
from layertap.files.format import row_digests
from layertap.writing.recorder import describe

logger = logging.getLogger(__name__)

LayerRun = tuple[int, int, slice]


@dataclass(slots=True, eq=False)
class Running:
    """One request that is being captured.

    Attributes:
        order: what is owed.
        runs: (first, stop) of the packed layers of this worker, and the capture's slots that they are.
        failure: why its rows are lost, once they are.
    """

    order: Order
    runs: tuple[LayerRun, ...]
    failure: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether its rows are all here and packed as the file has them."""
        num_layers = len(self.order.spec.layers)
        return self.runs == ((0, num_layers, slice(0, num_layers)),)


def layer_runs(layers: tuple[int, ...], held: frozenset[int]) -> tuple[LayerRun, ...]:
    """Group the request's layers that are held here into runs of neighbouring slots, in packed order."""
    runs: list[LayerRun] = []
    for packed, slot in enumerate(slot for slot, layer in enumerate(layers) if layer in held):
        if runs and runs[-1][2].stop == slot:
            first, _, so_far = runs[-1]
            runs[-1] = (first, packed + 1, slice(so_far.start, slot + 1))
        else:
            runs.append((packed, packed + 1, slice(slot, slot + 1)))
    return tuple(runs)


def want_of(order: Order, taps: tuple[int, ...]) -> Want:
    """What the request wants of a worker with these taps."""
    held = [layer for layer in order.spec.layers if layer in taps]
    ranks = tuple(held.index(layer) if layer in held else SKIP for layer in taps)
    return Want(candidates=order.spec.candidates, ranks=ranks, num_layers=len(held))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRoom:
    """How much memory the gathering of single rows may take.

    Attributes:
        num_requests: requests of a step at most, and those that ended lately.
        limit_bytes: of the rows of one number of layers.
    """

    num_requests: int
    limit_bytes: int


class Unpacker:
    """See the module. Subclasses say what becomes of rows, failures and endings; their methods run on its thread.

    Args:
        taps: layer ids of this worker.
        dtype: compute dtype of the rows.
        gather: room in which single rows are gathered, or None to hand on each by itself.
    """

    def __init__(self, taps: tuple[int, ...], dtype: torch.dtype, gather: "GatherRoom | None" = None) -> None:
        self._gather = gather
        self._banks: dict[int, Bank] = {}
        self._taps = frozenset(taps)
        self._dtype = dtype
        self._prefix: PrefixRows | None = None
        self.prefix_lost = 0
        self._running: dict[str, Running] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="layertap-unpacker", daemon=True)
        self._thread.start()

    def emit(self, running: Running, rows: Rows) -> None:
        """Rows of a request. Must see to it that `rows.release` is called."""
        raise NotImplementedError

    def fail(self, running: Running, reason: str) -> None:
        """The rows of a request are lost; called once."""
        raise NotImplementedError

    def end(self, running: Running | None, finish: Finish) -> None:
        """The request ended; all its rows of this worker were emitted."""
        raise NotImplementedError

    def order(self, order: Order) -> None:
        """Begin a request."""
        running = Running(order, layer_runs(order.spec.layers, self._taps))
        self._queue(lambda: self._running.__setitem__(order.request_id, running))

    def counts(self) -> dict[str, float]:
        """For metrics, by the names of `metrics`; a pipeline stage that doesn't publish says only what it lost."""
        return {"prefix_lost": self.prefix_lost}

    def wait_for_admissions(self, timeout_seconds: float) -> None:
        """Wait until readers may learn the paths of the requests ordered so far."""

    def step(self, step: Step) -> None:
        """Hand over a step's rows."""
        self._queue(lambda: self._take(step))

    def keep(self, news: PrefixNews) -> None:
        """Keep rows of the step that is handed over next."""
        self._queue(lambda: self._keep(news))

    def reuse(self, number: int, news: PrefixNews) -> None:
        """Deliver rows that were kept, behind those of step `number`."""

        def task() -> None:
            for reuse in news.reuses:
                self._reuse(number, reuse)

        self._queue(task)

    def finish(self, finish: Finish) -> None:
        """This worker has handed over all rows of the request."""

        def task() -> None:
            self._emit_gathered(finish.request_id)
            if self._prefix is not None:
                self._prefix.forget(finish.request_id)
            self.end(self._running.pop(finish.request_id, None), finish)

        self._queue(task)

    def lose(self, request_ids: Iterable[str], reason: str) -> None:
        """The rows of these requests can't be had any more."""
        lost = list(request_ids)

        def task() -> None:
            for request_id in lost:
                self._lose(request_id, reason)

        self._queue(task)

    def close(self) -> None:
        """Hand over what is queued, fail what hasn't ended, and end. Idempotent."""
        if self._thread.is_alive():
            self._queue(self._fail_all)
            self._tasks.put(None)
            self._thread.join()

    def _queue(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # the thread serves every request
                logger.exception("layertap: a step's rows could not be handed over")

    def _take(self, step: Step) -> None:
        step.wait()
        release = Countdown(step.release)
        try:
            positions, input_ids = step.positions_and_ids()
            unwritten = step.unwritten()
            for chunk in self._gather_singles(step, positions, input_ids, unwritten):
                running = self._running.get(chunk.request_id)
                if running is None or running.failure is not None:
                    continue
                try:
                    self._take_chunk(step, chunk, running, positions, input_ids, unwritten, release)
                except Exception as exc:
                    logger.exception("layertap: rows of request %s are lost", chunk.request_id)
                    self._lose(chunk.request_id, describe(exc))
        finally:
            release.done()

    def _gather_singles(
        self,
        step: Step,
        positions: NDArray[np.int64],
        input_ids: NDArray[np.int64],
        unwritten: NDArray[np.bool_],
    ) -> list[Chunk]:
        """Put single rows into the banks; return the chunks that go their own way."""
        if self._gather is None or unwritten.any():
            return step.chunks
        others: list[Chunk] = []
        singles: dict[int, list[Chunk]] = {}
        for chunk in step.chunks:
            running = self._running.get(chunk.request_id)
            single = chunk.stop - chunk.first == 1 and not self._keeps(chunk.request_id)
            if single and running is not None and running.failure is None:
                singles.setdefault(chunk.num_layers, []).append(chunk)
            else:
                others.append(chunk)
        for num_layers, chunks in singles.items():
            bank = self._bank(num_layers, step.cells.shape[1])
            names = [chunk.request_id for chunk in chunks]
            if not bank.has_room(names):
                others += chunks
                continue
            rows = np.fromiter((chunk.first for chunk in chunks), np.int64, len(chunks))
            cells = np.fromiter((chunk.cell for chunk in chunks), np.int64, len(chunks))
            for gathered in bank.add(step.number, names, cells, positions[rows], input_ids[rows], step.cells):
                self._emit(gathered)
        for chunk in others:  # what came before goes on before
            self._emit_gathered(chunk.request_id, keep=True)
        return others

    def _bank(self, num_layers: int, cell_bytes: int) -> Bank:
        assert self._gather is not None
        if num_layers not in self._banks:
            room = self._gather
            self._banks[num_layers] = Bank(room.num_requests, num_layers, cell_bytes, room.limit_bytes)
        return self._banks[num_layers]

    def _emit_gathered(self, request_id: str, *, keep: bool = False) -> None:
        for bank in self._banks.values():
            gathered = bank.take(request_id)
            if gathered is not None:
                self._emit(gathered)
            if not keep:
                bank.drop(request_id)

    def _emit(self, gathered: Gathered) -> None:
        release = Countdown(gathered.release or _nothing)
        try:
            running = self._running.get(gathered.request_id)
            if running is None or running.failure is not None:
                return
            data = convert(gathered.data, self._dtype, running.order.spec.dtype)
            for first, stop, slots in running.runs:
                self.emit(
                    running,
                    Rows(
                        step=gathered.step,
                        start=gathered.start,
                        input_ids=gathered.input_ids,
                        slots=slots,
                        data=data[:, first:stop],
                        release=release.hold() if data is gathered.data else None,
                    ),
                )
        finally:
            release.done()

    def _take_chunk(
        self,
        step: Step,
        chunk: Chunk,
        running: Running,
        positions: NDArray[np.int64],
        input_ids: NDArray[np.int64],
        unwritten: NDArray[np.bool_],
        release: "Countdown",
    ) -> None:
        tokens = slice(chunk.first, chunk.stop)
        num_rows = chunk.stop - chunk.first
        cells = slice(chunk.cell, chunk.cell + num_rows * chunk.num_layers)
        if unwritten[cells].any():
            self._lose(
                chunk.request_id,
                f"{int(unwritten[cells].sum())} of {num_rows * chunk.num_layers} rows weren't written by the tap in "
                "this step: the model ran without it (a compile cache of vLLM made without layertap?)",
            )
            return
        start = int(positions[tokens][0])
        if not np.array_equal(positions[tokens], np.arange(start, start + num_rows)):
            self._lose(chunk.request_id, "the engine's positions of one chunk aren't consecutive")
            return
        data = step.cells[cells].reshape(num_rows, chunk.num_layers, -1)
        if self._prefix is not None:
            self._prefix.put(chunk.request_id, start, input_ids[tokens], data)
        converted = convert(data, self._dtype, running.order.spec.dtype)
        digests, all_finite = None, False
        if step.looks is not None and converted is data and running.is_whole:
            row_bytes = data.shape[1] * data.shape[2]
            digests, all_finite = step.looks.of(chunk, input_ids[tokens], row_bytes) or (None, False)
            # one of them for all: the writer would spend as much time on every row as it spends on writing it
            if digests is not None and digests[-1] != row_digests(data[-1:].reshape(1, -1), input_ids[tokens][-1:])[0]:
                self._lose(
                    chunk.request_id,
                    "the device's digest of a row isn't the host's: the copy from the device is damaged",
                )
                return
        for first, stop, slots in running.runs:
            rows = Rows(
                step=step.number,
                start=start,
                input_ids=input_ids[tokens],
                slots=slots,
                data=converted[:, first:stop],
                release=release.hold() if converted is data else None,
                digests=digests,
                all_finite=all_finite,
            )
            self.emit(running, rows)

    def _keep(self, news: PrefixNews) -> None:
        for fill in news.fills:
            running = self._running.get(fill.request_id)
            if running is not None:
                held = [layer for layer in running.order.spec.layers if layer in self._taps]
                self._slots_of(news).begin(fill, held)

    def _keeps(self, request_id: str) -> bool:
        return self._prefix is not None and self._prefix.expects(request_id)

    def _slots_of(self, news: PrefixNews) -> PrefixRows:
        if self._prefix is None:
            self._prefix = PrefixRows(news.num_slots, news.block_size, news.cell_bytes)
        return self._prefix

    def _reuse(self, number: int, reuse: Reuse) -> None:
        running = self._running.get(reuse.request_id)
        if running is None or running.failure is not None:
            return
        layers = running.order.spec.layers
        columns = [slot for slot, layer in enumerate(layers) if layer in self._taps]
        try:
            if self._prefix is None:
                raise LookupError("rows of cached blocks were never kept")
            for start, input_ids, cells in self._prefix.take(reuse, columns):
                data = convert(cells, self._dtype, running.order.spec.dtype)
                for first, stop, slots in running.runs:
                    rows = Rows(step=number, start=start, input_ids=input_ids, slots=slots, data=data[:, first:stop])
                    self.emit(running, rows)
        except Exception as exc:
            logger.exception("layertap: rows of request %s are lost", reuse.request_id)
            self._lose(reuse.request_id, describe(exc))

    def _lose(self, request_id: str, reason: str) -> None:
        running = self._running.get(request_id)
        if running is not None and running.failure is None:
            running.failure = reason
            if self._prefix is not None:  # the scheduler's side takes for kept what was to be
                self.prefix_lost += 1
            self.fail(running, reason)

    def _fail_all(self) -> None:
        for request_id in list(self._running):
            self._emit_gathered(request_id)
            self._lose(request_id, "the engine was closed before the request was finished")
        self._running.clear()


def convert(data: NDArray[np.uint8], dtype: torch.dtype, saved: str) -> NDArray[np.uint8]:
    """Rows [n, layers, bytes] in the dtype that is saved; the same array where that is the compute dtype."""
    num_rows, num_slots, num_bytes = data.shape
    wanted, width = storage(saved, num_bytes // dtype.itemsize)
    if wanted == dtype:
        return data
    values = torch.from_numpy(np.ascontiguousarray(data)).view(dtype)
    converted = torch.empty(num_rows * num_slots, width, dtype=wanted)
    put(converted, values.flatten(0, 1))
    out: NDArray[np.uint8] = converted.view(torch.uint8).numpy()
    return out.reshape(num_rows, num_slots, -1)


def _nothing() -> None:
    pass


class Countdown:
    """Calls `release` once, when everybody who holds a part is done."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._count = 1
        self._lock = threading.Lock()

    def hold(self) -> Callable[[], None]:
        """One more holder; what it is to call."""
        with self._lock:
            self._count += 1
        return self.done

    def done(self) -> None:
        """One holder less."""
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._release()
