"""A server in a thread, for tests, notebooks and training loops."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from layertap.errors import LayertapError
from layertap.frontend import Frontend
from layertap.serving.app import build_app
from layertap.serving.listening import Server, bind, url_of
from layertap.serving.settings import ServerSettings
from layertap.serving.state import ServerState


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
    claimed = bind(host, port)
    app, state = build_app(front, settings)
    ready = threading.Event()
    server = Server(app, ready.set, state.is_at_rest)

    def work() -> None:
        try:
            with contextlib.suppress(SystemExit):  # uvicorn's way to say that the start failed
                server.run(sockets=[claimed])
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="layertap-serve", daemon=True)
    thread.start()
    ready.wait()
    if not server.started:
        raise LayertapError("the server didn't start; the log has the reason")
    try:
        yield RunningServer(url_of(host, claimed), state)
    finally:
        server.should_exit = True
        thread.join()
        claimed.close()
