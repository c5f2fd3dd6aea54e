"""The engine's side of the writer process: a thread that waits for copies and sends, and one that takes room back.

What the engine's own thread does here is to put things into a queue.
"""

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from layertap.engines.vllm.collector import FAILURES
from layertap.engines.vllm.looks import Looks
from layertap.engines.vllm.messages import Finish, Order, PrefixNews
from layertap.engines.vllm.shared import SharedCells
from layertap.engines.vllm.tap import Step
from layertap.engines.vllm.writer import WriterSetup
from layertap.files.publish import write_error
from layertap.writing.recorder import describe

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 120.0
_START_SECONDS = 120.0
_NO_MESSAGE = ("nothing", None)
_DIED = "the writer process of the engine died"
_collectors: "weakref.WeakSet[RemoteCollector]" = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: its copy of the connection would keep the writer from noticing that the engine is gone."""
    for collector in list(_collectors):
        collector.close_inherited()
    _collectors.clear()


os.register_at_fork(after_in_child=_close_inherited)


class RemoteCollector:
    """Takes orders, steps and endings as a Collector does, for a process of its own.

    Args:
        setup: what that has to know.
        ring: where the rows of steps are.
        seen_fd: of a table that it shares with other writers (see SeenRows), or None.
    """

    def __init__(self, setup: WriterSetup, ring: SharedCells, seen_fd: int | None = None) -> None:
        mine, theirs = socket.socketpair()
        self.setup = setup
        self.pid: int | None = None
        shared = [ring.fd] if seen_fd is None else [ring.fd, seen_fd]
        self._launcher = subprocess.Popen(
            [
                sys.executable,
                *("-m", "layertap.engines.vllm.writer"),
                *(str(number) for number in (os.getpid(), theirs.fileno(), *shared)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # whoever reads the engine's output to its end must not have to wait for the writer's
            pass_fds=(theirs.fileno(), *shared),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self._connection = Connection(mine.detach())
        self._connection.send(setup)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._num_ordered = self._num_admitted = self._num_waited_for = 0
        self._dead = self._closing = False
        self._sending = threading.Lock()
        self._running: dict[str, Order] = {}
        self._ending: set[str] = set()
        self._held: dict[int, Step] = {}
        self._next_key = 0
        self._counts: dict[str, float] = {}
        self._num_lost = 0
        self._sender = threading.Thread(target=self._send_all, name="layertap-sender", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name="layertap-receiver", daemon=True)
        self._sender.start()
        self._receiver.start()
        _collectors.add(self)

    def order(self, order: Order) -> None:
        """Begin a capture."""
        with self._state:
            dead = self._dead
            if dead:
                self._num_lost += 1
            else:
                self._running[order.request_id] = order
                self._num_ordered += 1
            ending = order.request_id in self._ending
        if dead:
            _tell_reader(order)
        elif ending:  # a name that is used again: behind its earlier bearer
            self._outbox.put(("order", order))
        else:  # not behind the rows of steps that still run, which the engine would then wait for
            try:
                self._send(("order", order))
            except OSError as exc:
                self._died(exc)

    def wait_for_admissions(self, timeout_seconds: float) -> None:
        """Wait until the locks of new captures are held. Those of a store that was too slow aren't waited for again."""
        with self._state:
            if self._num_waited_for == self._num_ordered:
                return
        self.wait_until_started()
        with self._state:
            self._state.wait_for(lambda: self._dead or self._num_admitted >= self._num_ordered, timeout_seconds)
            self._num_waited_for = self._num_ordered

    def wait_until_started(self) -> None:
        """Wait until the process has read its first message: what it takes to begin says nothing of the store."""
        if self.pid is None:
            with self._state:
                self._state.wait_for(lambda: self._dead or self.pid is not None, _START_SECONDS)

    def step(self, step: Step) -> None:
        """Hand over a step's rows."""
        self._outbox.put(("step", step))

    def keep(self, news: PrefixNews) -> None:
        """Keep rows of the step that is handed over next."""
        self._outbox.put(("keep", news))

    def reuse(self, number: int, news: PrefixNews) -> None:
        """Deliver rows that were kept, behind those of step `number`."""
        self._outbox.put(("reuse", (number, news)))

    def finish(self, finish: Finish) -> None:
        """All rows of the request were handed over."""
        with self._state:
            self._running.pop(finish.request_id, None)
            self._ending.add(finish.request_id)
        self._outbox.put(("finish", finish))

    def lose(self, request_ids: Iterable[str], reason: str) -> None:
        """The rows of these requests can't be had any more."""
        self._outbox.put(("lose", (list(request_ids), reason)))

    def counts(self) -> dict[str, float]:
        """What the writer reported last, and what was lost with it."""
        with self._state:
            counts = dict(self._counts)
            if self._num_lost:
                counts[f"{FAILURES}.engine"] = counts.get(f"{FAILURES}.engine", 0) + self._num_lost
                counts["in_flight_bytes"] = 0
        return counts

    @property
    def is_alive(self) -> bool:
        """False once the writer is known to be gone."""
        return not self._dead

    def knows(self, request_id: str) -> bool:
        """Whether something of a request of this name is still to be sent."""
        with self._state:
            return request_id in self._running or request_id in self._ending

    def end(self) -> None:
        """Nothing more comes: the writer publishes what is finished and fails the rest."""
        self._closing = True
        self._outbox.put(None)

    def close(self) -> None:
        """As `end`, and wait for it. Idempotent."""
        self.end()
        self._sender.join(_CLOSE_SECONDS)
        self._receiver.join(_CLOSE_SECONDS)
        if self._receiver.is_alive():
            logger.warning("layertap: the writer process still writes; it ends by itself")

    def close_inherited(self) -> None:
        """In a forked child: close its copy of the connection."""
        with contextlib.suppress(OSError):
            self._connection.close()

    def _send_all(self) -> None:
        for kind, content in self._messages():
            try:
                if kind == "step":
                    self._send_step(content)
                elif not self._dead:
                    self._send((kind, content))
                if kind == "finish":
                    with self._state:
                        self._ending.difference_update(finish.request_id for finish in content)
            except OSError as exc:
                self._died(exc)
            except Exception:  # the thread serves every request
                logger.exception("layertap: %s could not be sent to the writer", kind)
        # only this direction: the writer still has to say which room is free
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            try:
                end.shutdown(socket.SHUT_WR)
            except OSError as exc:
                logger.debug("layertap: the writer is gone: %s", exc)

    def _messages(self) -> Iterator[tuple[str, Any]]:
        """What was put into the outbox until it ends; endings that follow one another come as one, as many end in one step."""
        endings: list[Finish] = []
        while True:
            try:
                message = self._outbox.get(block=not endings)
            except queue.Empty:
                message = _NO_MESSAGE
            if message is not None and message[0] == "finish":
                endings.append(message[1])
                continue
            if endings:
                yield "finish", endings
                endings = []
            if message is None:
                return
            if message is not _NO_MESSAGE:
                yield message

    def _send_step(self, step: Step) -> None:
        try:
            step.wait()
            chunks = [(c.request_id, c.first, c.stop, c.cell, c.num_layers, c.plan) for c in step.chunks]
            facts = np.ascontiguousarray(step.positions_and_ids())
            looks = None
            if isinstance(step.looks, Looks):
                looks = step.looks.finished(step.chunks, facts[1], step.cells.shape[1])
        except Exception as exc:
            step.release()
            if not self._dead:
                lost = [chunk.request_id for chunk in step.chunks]
                self._send(("lose", (lost, f"the rows of a step could not be had: {describe(exc)}")))
            raise
        with self._state:
            if self._dead:
                step.release()
                return
            key, self._next_key = self._next_key, self._next_key + 1
            self._held[key] = step
        cells = step.first_cell, step.first_cell + len(step.cells)
        self._send(("step", (key, step.number, step.generation, chunks, *cells, facts, looks)))

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive_all(self) -> None:
        try:
            while True:
                kind, content = self._connection.recv()
                if kind == "hello":
                    with self._state:
                        self.pid = content
                        self._state.notify_all()
                    self._launcher.wait()
                    continue
                with self._state:
                    if kind == "admitted":
                        self._num_admitted += 1
                        self._state.notify_all()
                        continue
                    if kind == "counts":
                        self._counts = content
                        continue
                    key, self._counts = content
                    step = self._held.pop(key)
                step.release()
        except (EOFError, OSError) as exc:
            self._died(exc)

    def _died(self, exc: BaseException) -> None:
        with self._state:
            if self._dead:
                return
            self._dead = True
            running, self._running = list(self._running.values()), {}
            held, self._held = list(self._held.values()), {}
            if not self._closing:
                self._num_lost += len(running)
            self._state.notify_all()
        for step in held:
            step.release()
        if self._closing:  # the writer told the readers itself
            return
        if running:
            logger.error("layertap: %s (%s); %d requests lose their hidden states", _DIED, exc, len(running))
        for order in running:
            _tell_reader(order)


def _tell_reader(order: Order) -> None:
    try:
        write_error(Path(order.path), _DIED, order.public_id)
    except OSError as exc:
        logger.warning("layertap: request %s: the reason can't be put on record: %s", order.public_id, describe(exc))
