"""Addresses, and servers that don't start."""

import contextlib
import socket

import pytest
from fastapi import FastAPI

from layertap.errors import LayertapError, OptionError
from layertap.serving.listening import bind, run, url_of


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
        run(FastAPI(lifespan=lifespan), claimed)
    assert "the model can't generate" in caplog.text
