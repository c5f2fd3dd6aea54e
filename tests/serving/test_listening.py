"""Addresses, and servers that don't start."""

import asyncio
import contextlib
import socket
import threading

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from layertap.errors import LayertapError, OptionError
from layertap.serving.listening import Server, bind, run, url_of


def test_an_address_of_ipv6_is_one_that_clients_can_use():
    with bind("127.0.0.1", 0) as claimed:
        port = claimed.getsockname()[1]
        assert url_of("::1", claimed) == f"http://[::1]:{port}"
        assert url_of("localhost", claimed) == f"http://localhost:{port}"


def test_a_claimed_address_is_refused_and_nobody_connects_before_the_server_listens():
    with bind("127.0.0.1", 0) as claimed:
        address = claimed.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        claimed.listen()
        with pytest.raises(OptionError, match="in use"):
            bind(*address)


def test_a_server_whose_start_fails_is_an_error_and_no_end_in_good_order(caplog):
    @contextlib.asynccontextmanager
    async def lifespan(_app):
        raise RuntimeError("the model can't generate")
        yield

    with bind("127.0.0.1", 0) as claimed, pytest.raises(LayertapError, match="didn't start"):
        run(Server(FastAPI(lifespan=lifespan)), claimed)
    assert "the model can't generate" in caplog.text


@contextlib.contextmanager
def listening(app, **options):
    """A server in a thread; yields it and its address."""
    with bind("127.0.0.1", 0) as claimed:
        ready = threading.Event()
        server = Server(app, ready.set, **options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [claimed]})
        thread.start()
        assert ready.wait(60)
        yield server, claimed.getsockname()
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()


ENDLESS = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n"
HALF = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"


def asked(address, request):
    one = socket.create_connection(address)
    one.sendall(request)
    return one


def endless(begun):
    """An app one of whose answers never ends."""
    app = FastAPI()

    @app.middleware("http")
    async def seen(request, call_next):
        begun.set()
        return await call_next(request)

    @app.post("/read")
    async def read(body: dict):
        return body

    @app.get("/endless")
    async def answer():
        async def chunks():
            while True:
                yield b"x" * 100_000
                await asyncio.sleep(0)

        return StreamingResponse(chunks())

    return app


@pytest.mark.parametrize("request_", [ENDLESS, HALF], ids=["takes nothing", "sends half"])
def test_a_client_that_stalls_doesnt_keep_the_server_from_ending(request_):
    begun = threading.Event()
    with listening(endless(begun), patience_seconds=0.5) as (_, address):
        stalled = asked(address, request_)
        assert begun.wait(60)
    stalled.close()


def test_nobody_is_left_before_the_server_is_at_rest():
    begun, rest = threading.Event(), threading.Event()
    looks = []

    def at_rest():
        looks.append(len(server.server_state.connections))
        if len(looks) > 20:
            rest.set()
        return rest.is_set()

    with listening(endless(begun), at_rest=at_rest, patience_seconds=0.2) as (server, address):
        one = asked(address, ENDLESS)
        assert begun.wait(60)
    assert rest.is_set()
    assert set(looks[:20]) == {1}
    one.close()
