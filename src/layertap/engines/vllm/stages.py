"""Pipeline parallelism: the later stages send their rows to the first, which publishes.

One connection per stage keeps rows and endings in order, so a request is finished when every stage has said that it is done. The
receiver takes rows only within a byte budget: a slow disk makes the sending stage wait, and with it the engine. Stages of one
machine use a socket without a name in the file system, stages of several machines TCP on the address that vLLM itself uses.
"""

import logging
import secrets
import threading
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layertap.assembly import Rows
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.messages import Finish
from layertap.engines.vllm.unpack import Running, Unpacker
from layertap.errors import EngineError
from layertap.writing.budget import ByteBudget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the first stage listens, and the key that its peers must know."""

    address: str | bytes | tuple[str, int]
    key: bytes


@dataclass(frozen=True, slots=True)
class Listening:
    """The first stage's socket; peers may connect from now on."""

    listener: Listener
    address: Address


def listen(num_peers: int, host: str | None = None) -> Listening:
    """Open the first stage's socket.

    Args:
        num_peers: later stages.
        host: this machine's address where a stage runs on another one; None where all run on this one.

    Raises:
        EngineError: the address can't be listened on.
    """
    key = secrets.token_bytes(32)
    wanted: str | tuple[str, int] = f"\0layertap-{secrets.token_hex(16)}" if host is None else (host, 0)
    try:
        listener = Listener(wanted, backlog=num_peers, authkey=key)
    except OSError as exc:
        raise EngineError(
            f"hidden states of a pipeline over several machines: the first stage can't listen on {host!r} ({exc}); VLLM_HOST_IP "
            "names the IPv4 address that the others reach it by"
        ) from exc
    return Listening(listener, Address(listener.address, key))


def connect_stages(pp: Any) -> Listening | Address:
    """Agree on an address; called by all stages of a group. The first gets its socket, the others where it is."""
    machines: list[str] = [""] * pp.world_size
    torch.distributed.all_gather_object(machines, _machine(), group=pp.cpu_group)
    if not pp.is_first_rank:
        agreed: Address | str = pp.broadcast_object(None, src=0)
        if isinstance(agreed, str):
            raise EngineError(agreed)
        return agreed
    try:
        listening = listen(pp.world_size - 1, _own_address() if len(set(machines)) > 1 else None)
    except EngineError as exc:  # the others are waiting, and stop for the same reason
        pp.broadcast_object(str(exc), src=0)
        raise
    pp.broadcast_object(listening.address, src=0)
    return listening


def _machine() -> str:
    """Equal where processes can reach each other by a nameless socket: the same boot and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


def _own_address() -> str:
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


class StageReceiver:
    """The first stage's side: a thread that accepts, and one per peer."""

    def __init__(self, listening: Listening, collector: Collector, num_peers: int, limit_bytes: int) -> None:
        self._collector = collector
        self._budget = ByteBudget(limit_bytes)
        self._listener = listening.listener
        self._num_peers = num_peers
        threading.Thread(target=self._accept, name="layertap-stages", daemon=True).start()

    def _accept(self) -> None:
        accepted = 0
        while accepted < self._num_peers:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, OSError) as exc:  # somebody who isn't a stage
                logger.warning("layertap: a connection to the first pipeline stage was refused: %s", exc)
                continue
            accepted += 1
            threading.Thread(target=self._serve, args=(connection,), name="layertap-stage", daemon=True).start()
        self._listener.close()

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
        except (EOFError, OSError) as exc:
            logger.debug("layertap: a pipeline stage ended: %s", exc)
        except Exception:
            logger.exception("layertap: a pipeline stage's rows could not be read")
        self._collector.stage_gone()

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
        try:
            self._connection = Client(address.address, authkey=address.key)
        except (OSError, EOFError, AuthenticationError) as exc:
            raise EngineError(
                f"hidden states of a pipeline: the first stage can't be reached at {address.address!r} ({exc})"
            ) from exc
        super().__init__(taps, dtype)

    def emit(self, running: Running, rows: Rows) -> None:
        content = (rows.step, rows.start, rows.slots, rows.data.shape, rows.input_ids)
        try:
            self._connection.send(("rows", running.order.request_id, content))
            self._connection.send_bytes(np.ascontiguousarray(rows.data).data.cast("B"))
        finally:
            if rows.release is not None:
                rows.release()

    def fail(self, running: Running, reason: str) -> None:
        self._connection.send(("lost", running.order.request_id, reason))

    def end(self, running: Running | None, finish: Finish) -> None:
        self._connection.send(("done", finish.request_id, None))

    def close(self) -> None:
        super().close()
        self._connection.close()
