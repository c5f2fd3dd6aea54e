"""Listening and running an ASGI app in the foreground. Knows no engine."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from layertap.errors import LayertapError, OptionError

logger = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "::1")
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Claim an address before a model is loaded for it. Connections are refused until the server is ready and listens.

    Raises:
        OptionError: the address can't be had.
    """
    if not 0 <= port <= 65535:  # it would be cut to 16 bits without a word
        raise OptionError(f"port: expected 0 to 65535, got {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        claimed = socket.socket(family, kind)
    except OSError as exc:
        raise OptionError(f"host {host!r}, port {port}: {exc.strerror or exc}") from exc
    try:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(address)
    except (OSError, OverflowError) as exc:
        claimed.close()
        hint = "; another program listens there, give another port (0 takes a free one)" if _is_taken(exc) else ""
        raise OptionError(f"host {host!r}, port {port}: {getattr(exc, 'strerror', None) or exc}{hint}") from exc
    return claimed


def _is_taken(exc: Exception) -> bool:
    return isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in _LOOPBACK or host.startswith("127.")


def warn_if_open(host: str, api_keys: Sequence[str], may: str) -> None:
    """Say so where other machines reach a server that asks for no key, and what everybody may do there."""
    if not is_loopback(host) and not api_keys:
        logger.warning("listening on %s without --api-key: everybody who reaches it may %s", host, may)


def url_of(host: str, claimed: socket.socket) -> str:
    """Where a claimed address is reached."""
    return f"http://{f'[{host}]' if ':' in host else host}:{claimed.getsockname()[1]}"


def run(server: "Server", claimed: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, finish what is running, and return. A second SIGINT drops it.

    Raises:
        LayertapError: it didn't come to that.
    """
    with contextlib.suppress(SystemExit):  # uvicorn's way to say so
        server.run(sockets=[claimed])
    if not server.started:
        raise LayertapError("the server didn't start; the log has the reason")


@contextlib.contextmanager
def signals_end_the_server() -> Iterator[None]:
    """Keep SIGTERM and SIGINT from ending the process before everything is published.

    uvicorn raises the signal that stopped it once more when it has stopped; that one is taken here and means nothing.
    """
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """Tells when it listens. At its end it finishes what is running, but waits for no client that takes nothing any more.

    Args:
        app: what is served.
        on_ready: called once it listens.
        at_rest: whether nothing is generated or written any more, so that a connection on which nothing moves has no reason.
        patience_seconds: for such a connection.
    """

    def __init__(
        self,
        app: Any,
        on_ready: Callable[[], None] | None = None,
        at_rest: Callable[[], bool] = lambda: True,
        patience_seconds: float = 30.0,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                backlog=_BACKLOG,
                log_level="warning",
                log_config=None,
                access_log=False,
                timeout_keep_alive=75,
                lifespan="on",
                server_header=False,
            )
        )
        self._on_ready = on_ready
        self._at_rest = at_rest
        self._patience_seconds = patience_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        leaving = asyncio.create_task(self._leave_stalled())
        try:
            await super().shutdown(sockets)
        finally:
            leaving.cancel()

    async def _leave_stalled(self) -> None:
        clock = asyncio.get_running_loop().time
        moved: dict[Any, tuple[int, float]] = {}
        while True:
            for connection in list(self.server_state.connections):
                transport: Any = connection.transport
                unsent = transport.get_write_buffer_size()
                before, since = moved.get(connection, (-1, 0.0))
                if unsent != before or not self._at_rest():
                    moved[connection] = (unsent, clock())
                elif clock() - since > self._patience_seconds:
                    transport.abort()
            await asyncio.sleep(self._patience_seconds / 60)
