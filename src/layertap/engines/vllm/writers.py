"""Several writer processes beside one engine: each request is one's, from its order to its end.

They share the ring, the byte budget (a part each), the writer threads and the table of rows that were seen. Who has a request's
rows is decided here; a step goes to those that have some of its requests, and its room is free when all of them are done.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import replace

from layertap.engines.vllm.messages import Finish, Order, PrefixNews
from layertap.engines.vllm.remote import RemoteCollector
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.shared import SharedCells
from layertap.engines.vllm.tap import Step
from layertap.engines.vllm.unpack import Countdown, GatherRoom
from layertap.engines.vllm.writer import WriterSetup
from layertap.errors import EngineError
from layertap.writing.seen import shared_memory


def start_writers(setup: WriterSetup, ring: SharedCells, num_processes: int) -> "RemoteCollector | Writers":
    """Start the writer processes of an engine."""
    return RemoteCollector(setup, ring) if num_processes == 1 else Writers(setup, ring, num_processes)


class Writers:
    """As one RemoteCollector, for several. Called by the engine's thread.

    Args:
        setup: of all together.
        ring: where the rows of steps are.
        num_processes: at least two.
    """

    def __init__(self, setup: WriterSetup, ring: SharedCells, num_processes: int) -> None:
        seen_fd = shared_memory()
        share = _share(setup, num_processes)
        try:
            # one look at the folder is enough
            self.all = [
                RemoteCollector(replace(share, sweeps=number == 0), ring, seen_fd) for number in range(num_processes)
            ]
        finally:
            os.close(seen_fd)
        self._of: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._owed = [0] * num_processes
        """Rows that each writer's running requests may owe."""

    def order(self, order: Order) -> None:
        """Begin a capture, with the writer that has least to do."""
        name = order.request_id
        number = self._choose(name)
        self._forget(name)
        self._of[name], self._weights[name] = number, len(order.spec.candidates)
        self._owed[number] += self._weights[name]
        self.all[number].order(order)

    def _forget(self, request_id: str) -> int | None:
        number = self._of.pop(request_id, None)
        if number is not None:
            self._owed[number] -= self._weights.pop(request_id)
        return number

    def _choose(self, request_id: str) -> int:
        earlier = self._of.get(request_id)
        numbers = range(len(self.all))
        if earlier is None:
            earlier = next((number for number in numbers if self.all[number].knows(request_id)), None)
        if earlier is not None and self.all[earlier].is_alive:  # a name that is used again: behind its earlier bearer
            return earlier
        alive = [number for number in numbers if self.all[number].is_alive]
        return min(alive or numbers, key=self._owed.__getitem__)

    def wait_for_admissions(self, timeout_seconds: float) -> None:
        """Wait until the locks of new captures are held."""
        for writer in self.all:
            writer.wait_until_started()
        deadline = time.monotonic() + timeout_seconds
        for writer in self.all:
            writer.wait_for_admissions(max(0.0, deadline - time.monotonic()))

    def step(self, step: Step) -> None:
        """Hand over a step's rows, to each writer those of its requests."""
        parts: dict[int, list[Chunk]] = {}
        for chunk in step.chunks:
            number = self._of.get(chunk.request_id)
            if number is not None:  # else it has ended: an extra step of an asynchronous scheduler
                parts.setdefault(number, []).append(chunk)
        release = Countdown(step.release)
        for number, chunks in parts.items():
            self.all[number].step(step.part(chunks, release.hold()))
        release.done()

    def keep(self, news: PrefixNews) -> None:
        """One process keeps the rows of cached blocks; see `configured.num_writers`."""
        raise EngineError("prefix_rows_bytes needs one writer process")

    def reuse(self, number: int, news: PrefixNews) -> None:
        """As `keep`."""
        self.keep(news)

    def finish(self, finish: Finish) -> None:
        """All rows of the request were handed over."""
        number = self._forget(finish.request_id)
        if number is not None:
            self.all[number].finish(finish)

    def lose(self, request_ids: Iterable[str], reason: str) -> None:
        """The rows of these requests can't be had any more."""
        lost: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._of:
                lost.setdefault(self._of[request_id], []).append(request_id)
        for number, names in lost.items():
            self.all[number].lose(names, reason)

    def counts(self) -> dict[str, float]:
        """Of all together."""
        total: dict[str, float] = {}
        for writer in self.all:
            for name, count in writer.counts().items():
                total[name] = total.get(name, 0) + count
        return total

    def close(self) -> None:
        """Let the writers publish what is finished and fail the rest. Idempotent."""
        for writer in self.all:
            writer.end()
        for writer in self.all:
            writer.close()


def _share(setup: WriterSetup, num_processes: int) -> WriterSetup:
    """What one of several processes may use."""
    options, gather = setup.options, setup.gather
    return replace(
        setup,
        options=replace(
            options,
            max_bytes_in_flight=max(1, options.byte_budget() // num_processes),
            num_writer_threads=max(1, -(-options.num_writer_threads // num_processes)),
        ),
        gather=GatherRoom(num_requests=gather.num_requests, limit_bytes=gather.limit_bytes // num_processes),
        most_quarantined=max(1, setup.most_quarantined // num_processes),
    )
