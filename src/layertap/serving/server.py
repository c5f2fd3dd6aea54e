"""Running the app: in the foreground for the command line, in a thread for tests, notebooks and training loops."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from layertap.errors import LayertapError, OptionError
from layertap.frontend import Frontend
from layertap.serving.app import build_app
from layertap.serving.settings import ServerSettings
from layertap.serving.state import ServerState

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OptionError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise OptionError(f"--host {host} --port {port}: {exc.strerror or exc}") from exc
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in _LOOPBACK or host.startswith("127.")


def run(app: Any, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, finish what is running, and return. A second SIGINT stops at once."""
    uvicorn.Server(_config(app)).run(sockets=[listener])


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        lifespan="on",
        h11_max_incomplete_event_size=64 << 10,
        server_header=False,
    )


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in a thread.

    Attributes:
        url: where it answers.
        state: what its routes share.
    """

    url: str
    state: ServerState


@contextlib.contextmanager
def run_background(
    front: Frontend, settings: ServerSettings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[RunningServer]:
    """Serve an engine from a thread of this process; the engine stays open behind it.

    Args:
        front: `AsyncLLM(...).front`.
        settings: of the HTTP side.
        host, port: where to listen; port 0 takes a free one.
    """
    listener = listen(host, port)
    app, state = build_app(front, settings)
    server = uvicorn.Server(_config(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="layertap-serve", daemon=True)
    thread.start()
    while not state.ready:
        thread.join(0.01)
        if not thread.is_alive():
            raise LayertapError("the server didn't start; its log has the reason")
    try:
        yield RunningServer(f"http://{host}:{listener.getsockname()[1]}", state)
    finally:
        server.should_exit = True
        thread.join()
