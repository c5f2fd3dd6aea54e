"""Pipeline parallelism: the later stages send their rows to the first, which publishes.

One connection per stage keeps rows and endings in order, so a request is finished when every stage has said that it is done. The
receiver takes rows only within a byte budget: a slow disk makes the sending stage wait, and with it the engine.
"""

import logging
import os
import secrets
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layertap.assembly import Rows
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.messages import Finish
from layertap.engines.vllm.unpack import Running, Unpacker
from layertap.writing.budget import ByteBudget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the first stage listens, and the key that its peers must know."""

    address: str | tuple[str, int]
    key: bytes


def connect_stages(pp: Any) -> Address:
    """Agree on an address; called by all stages of a group."""
    address = None
    if pp.is_first_rank:
        folder = tempfile.mkdtemp(prefix="layertap-")
        address = Address(os.path.join(folder, "stages"), secrets.token_bytes(32))
    agreed: Address = pp.broadcast_object(address, src=0)
    return agreed


class StageReceiver:
    """The first stage's side: a thread that accepts, and one per peer."""

    def __init__(self, address: Address, collector: Collector, num_peers: int, limit_bytes: int) -> None:
        self._collector = collector
        self._budget = ByteBudget(limit_bytes)
        self._listener = Listener(address.address, authkey=address.key)
        self._num_peers = num_peers
        self._address = address
        threading.Thread(target=self._accept, name="layertap-stages", daemon=True).start()

    def _accept(self) -> None:
        for _ in range(self._num_peers):
            connection = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="layertap-stage", daemon=True).start()
        self._listener.close()
        if isinstance(self._address.address, str):
            Path(self._address.address).parent.rmdir()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                kind, request_id, content = connection.recv()
                if kind == "rows":
                    self._take_rows(connection, request_id, content)
                elif kind == "lost":
                    self._collector.stage_lost(request_id, content)
                else:
                    self._collector.stage_done(request_id)
        except (EOFError, OSError):
            return
        except Exception:
            logger.exception("layertap: a pipeline stage's rows could not be read")

    def _take_rows(self, connection: Connection, request_id: str, content: Any) -> None:
        step, start, slots, shape, input_ids = content
        num_bytes = int(np.prod(shape))
        self._budget.acquire(num_bytes, [])
        data = np.frombuffer(connection.recv_bytes(), np.uint8).reshape(shape)
        self._collector.rows_of_stage(
            request_id,
            Rows(
                step=step,
                start=start,
                input_ids=input_ids,
                slots=slots,
                data=data,
                release=lambda: self._budget.release(num_bytes),
            ),
        )


class StageSender(Unpacker):
    """A later stage's side."""

    def __init__(self, address: Address, taps: tuple[int, ...], dtype: torch.dtype) -> None:
        self._address = address
        self._connection: Connection | None = None
        super().__init__(taps, dtype)

    def emit(self, running: Running, rows: Rows) -> None:
        content = (rows.step, rows.start, rows.slots, rows.data.shape, rows.input_ids)
        try:
            connection = self._connected()
            connection.send(("rows", running.order.request_id, content))
            connection.send_bytes(np.ascontiguousarray(rows.data).data.cast("B"))
        finally:
            if rows.release is not None:
                rows.release()

    def fail(self, running: Running, reason: str) -> None:
        self._connected().send(("lost", running.order.request_id, reason))

    def end(self, running: Running | None, finish: Finish) -> None:
        self._connected().send(("done", finish.request_id, None))

    def close(self) -> None:
        super().close()
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = Client(self._address.address, authkey=self._address.key)
        return self._connection
