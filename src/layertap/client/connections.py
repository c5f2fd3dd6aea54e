"""Connections of the asynchronous client, one lane each.

httpx looks through all connections of its pool for each request, several times: with some hundred at once that takes more time than
the requests. Here each lane is a pool of one connection, and a free lane is at the top of a stack.
"""

from collections.abc import AsyncIterator
from typing import cast
from urllib.request import getproxies

import httpx

_MAX_IDLE = 256


def lanes_unless_proxied() -> "Lanes | None":
    """The transport for a client; None where the environment names a proxy, which is httpx's own business."""
    return None if {"http", "https", "all"} & set(getproxies()) else Lanes()


class Lanes(httpx.AsyncBaseTransport):
    """As many connections as there are requests at once; up to 256 of them are kept."""

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context()
        self._limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request on a lane of its own."""
        lane = self._idle.pop() if self._idle else httpx.AsyncHTTPTransport(verify=self._tls, limits=self._limits)
        try:
            answer = await lane.handle_async_request(request)
        except BaseException:
            await lane.aclose()
            raise
        stream = _Returning(cast(httpx.AsyncByteStream, answer.stream), self, lane)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream, extensions=answer.extensions)

    async def give_back(self, lane: httpx.AsyncHTTPTransport) -> None:
        """A lane is free again."""
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(lane)
        else:
            await lane.aclose()

    async def aclose(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        for lane in idle:
            await lane.aclose()


class _Returning(httpx.AsyncByteStream):
    """A body whose end frees its lane."""

    def __init__(self, inner: httpx.AsyncByteStream, lanes: Lanes, lane: httpx.AsyncHTTPTransport) -> None:
        self._inner = inner
        self._lanes = lanes
        self._lane: httpx.AsyncHTTPTransport | None = lane

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
        if self._lane is not None:
            lane, self._lane = self._lane, None
            await self._lanes.give_back(lane)
