"""What every request passes first: the API key, the limit of its size, and the count of what came of it. Plain ASGI."""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from starlette.datastructures import Headers

from layertap.serving.api_errors import ApiError
from layertap.serving.identity import ApiKeys, Caller

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping"})
CLIENT_CLOSED = 499


class Counter(Protocol):
    """Where answers are counted."""

    def answered(self, path: str, status: int, seconds: float) -> None:
        """One more answer."""


def too_large(max_body_bytes: int) -> ApiError:
    """The answer to a body over the limit."""
    return ApiError(
        413,
        f"the body is larger than {max_body_bytes} bytes, the server's --max-body-bytes; send fewer prompts at once",
        code="body_too_large",
    )


def check_length(headers: Headers, max_body_bytes: int) -> None:
    """Refuse a body that says itself that it is over the limit.

    Raises:
        ApiError: it is.
    """
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_body_bytes:
        raise too_large(max_body_bytes)


class Gate:
    """Wraps an ASGI app.

    Args:
        app: what is behind the gate.
        keys: who may come in.
        max_body_bytes: larger bodies are refused with a 413.
        counter: where answers are counted, or None.
    """

    def __init__(self, app: App, keys: ApiKeys, max_body_bytes: int, counter: Counter | None = None) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._counter = counter

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = CLIENT_CLOSED

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._let_in(scope, receive, counted)
        finally:
            if self._counter is not None:
                self._counter.answered(scope["path"], status, time.monotonic() - began)

    async def _let_in(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            caller = Caller() if scope["path"] in OPEN_PATHS else self._keys.caller(headers)
            if caller is None:
                raise ApiError(
                    401,
                    "no API key, or a wrong one: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": 'Basic realm="layertap", charset="UTF-8"'},
                )
            check_length(headers, self._max_body_bytes)
        except ApiError as exc:
            await exc.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, self._limited(receive), watched)
        except _TooLarge:
            if not started:
                await too_large(self._max_body_bytes).response()(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > self._max_body_bytes:
                    raise _TooLarge
            return message

        return limited


class _TooLarge(BaseException):
    """Not an Exception, so that no parser on the way turns it into another answer."""
