"""The writer process: takes steps from the engine's process and does everything behind the copy to the host.

Hashing, assembling and publishing take the interpreter's lock, which vLLM's own loop needs; so they have their own interpreter.
It ends when the engine closes the connection or dies: what was finished is published, the readers of what wasn't are told.

Run by `remote` as `python -m layertap.engines.vllm.writer ENGINE_PID CONNECTION_FD RING_FD [SEEN_FD]`.
"""

import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layertap.capture.options import StoreOptions
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.lifeline import Lifeline
from layertap.engines.vllm.looks import FinishedLooks
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.rowmap import Chunk
from layertap.engines.vllm.shared import SharedCells
from layertap.engines.vllm.tap import Step
from layertap.engines.vllm.unpack import GatherRoom
from layertap.files.reap import reap
from layertap.writing.recorder import MOST_QUARANTINED, Capture, Recorder
from layertap.writing.seen import SeenRows
from layertap.writing.shipping import is_object_store

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
_TORCH_THREADS = 2
_SWITCH_SECONDS = 0.0005
"""Of the interpreter: threads here alternate between short Python and long system calls, and must not wait 5 ms (the default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSetup:
    """What the writer process has to know.

    Attributes:
        options: the store's options.
        model, num_layers, facts: as of Recorder.
        taps: layer ids of the worker.
        dtype: compute dtype, by name.
        num_cells, cell_bytes: of the ring.
        gather: see Unpacker.
        most_quarantined: see Recorder.
        sweeps: whether this one looks for what a killed one left half-written.
    """

    options: StoreOptions
    model: str
    num_layers: int
    facts: dict[str, str]
    taps: tuple[int, ...]
    dtype: str
    num_cells: int
    cell_bytes: int
    gather: GatherRoom
    most_quarantined: int = MOST_QUARANTINED
    sweeps: bool = True


def make_recorder(setup: WriterSetup, seen: SeenRows | None = None) -> Recorder:
    """The corridor of a worker. What a killed one left half-written goes in the background: plain `vllm serve` has no reaper."""
    recorder = Recorder(
        setup.options,
        model=setup.model,
        num_layers=setup.num_layers,
        facts=setup.facts,
        seen=seen,
        most_quarantined=setup.most_quarantined,
    )
    if is_object_store(setup.options.handover):
        recorder.ship_to(setup.options.handover)
    if setup.sweeps:
        folder = Path(setup.options.shared_storage_path)
        threading.Thread(target=_sweep, args=(folder,), name="layertap-sweep", daemon=True).start()
    return recorder


def _sweep(folder: Path) -> None:
    try:
        found = reap(folder)
    except OSError as exc:  # mostly: the folder isn't there yet
        logger.debug("layertap: nothing was swept in %s: %s", folder, exc)
    else:
        if found.temporaries:
            logger.info("layertap: %d half-written files of dead writers removed", len(found.temporaries))


class Writer:
    """Serves one connection."""

    def __init__(self, connection: Connection, ring_fd: int, seen_fd: int | None = None) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        setup: WriterSetup = connection.recv()
        self._send(("hello", os.getpid()))
        self._ring = SharedCells(setup.num_cells, setup.cell_bytes, ring_fd)
        self._recorder = make_recorder(setup, SeenRows(seen_fd))
        self._collector = Collector(
            self._recorder,
            setup.taps,
            getattr(torch, setup.dtype),
            gather=setup.gather,
            on_admitted=self._admitted,
        )
        self._told: dict[str, float] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._report, name="layertap-report", daemon=True).start()

    def serve(self) -> None:
        """Until the engine's end of the connection is closed."""
        try:
            while True:
                self._handle(*self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._collector.close()
            self._ended.set()
            self._tell_counts()

    def _handle(self, kind: str, content: Any) -> None:
        if kind == "step":
            self._step(*content)
        elif kind == "order":
            order: Order = content
            self._collector.order(order)
        elif kind == "finish":
            finishes: list[Finish] = content
            for finish in finishes:
                self._collector.finish(finish)
        elif kind == "keep":
            self._collector.keep(content)
        elif kind == "reuse":
            self._collector.reuse(*content)
        elif kind == "lose":
            self._collector.lose(*content)
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _step(
        self,
        key: int,
        number: int,
        generation: int,
        chunks: list[tuple[Any, ...]],
        first: int,
        stop: int,
        facts: Any,
        looks: FinishedLooks | None,
    ) -> None:
        self._collector.step(
            Step(
                number,
                [Chunk(*chunk) for chunk in chunks],
                self._ring.array[first:stop],
                lambda: self._send(("free", (key, self._collector.counts()))),
                torch.from_numpy(np.asarray(facts)),
                first,
                self._ring.stamps[first:stop],
                generation,
                looks=looks,
            )
        )

    def _admitted(self, _capture: "Future[Capture]") -> None:
        self._send(("admitted", None))

    def _report(self) -> None:
        """Files are published behind the step that said so: what is counted then is told on its own."""
        while not self._ended.wait(_REPORT_SECONDS):
            self._tell_counts()

    def _tell_counts(self) -> None:
        counts = self._collector.counts()
        if counts != self._told:
            self._told = counts
            self._send(("counts", counts))

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:  # the engine is gone; what it handed over is published all the same
            logger.debug("layertap: the engine is gone")


def main() -> None:
    """See the module."""
    engine_pid, connection_fd, *shared_fds = (int(argument) for argument in sys.argv[1:])
    lifeline = Lifeline(engine_pid)
    # Out of vLLM's process tree, which it kills as it shuts down: what was finished must still be published.
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine's end of the connection decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(_TORCH_THREADS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    logging.basicConfig(level=logging.WARNING, format="layertap writer: %(message)s")
    lifeline.guard(connection_fd)
    try:
        Writer(Connection(connection_fd), *shared_fds).serve()
    except EOFError:
        logger.debug("layertap: the engine was gone before it said what is to be written")
    os._exit(0)


if __name__ == "__main__":
    main()
