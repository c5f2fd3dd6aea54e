"""The ASGI middleware inside `vllm serve`: what a KV connector can't do.

A connector can't answer 400 or 507 and can't add to an answer. This can: it checks `kv_transfer_params` before vLLM sees the
request, gives it an id and a place in the store, and puts the handle on each choice and on each choice's last chunk. It serves the
file routes too, and asks for the API key on every route (vLLM itself leaves /metrics, /tokenize and others open). The engine is
told where files go by options that only this middleware may set. Imports no engine.
"""

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from layertap.capture.options import StoreOptions
from layertap.serving.answers import Handles
from layertap.serving.api_errors import ApiError
from layertap.serving.files_app import build_files_app
from layertap.serving.gate import OPEN_PATHS, check_length, too_large
from layertap.serving.identity import ApiKeys
from layertap.serving.reaper import Reaper
from layertap.serving.vllm_admission import Admitted, RequestDesk
from layertap.serving.vllm_handles import AddHandles
from layertap.serving.vllm_spot_check import MARK, SpotChecks, ask, changes_weights
from layertap.writing.room import StoreRoom

CONFIG_ENV = "LAYERTAP_VLLM_MIDDLEWARE"
_KINDS = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareConfig:
    """What `layertap serve` tells the middleware, through the environment.

    Attributes:
        store: the store's options.
        shared: other connectors share `kv_transfer_params`.
        api_keys: who may come in.
        allow_delete: clients may free their files.
        max_body_bytes: larger requests are refused.
        spot_check: one captured request in so many is computed again and compared; 0 is never.
    """

    store: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    api_keys: tuple[str, ...] = ()
    allow_delete: bool = False
    max_body_bytes: int = 32 << 20
    spot_check: int = 0

    def dumps(self) -> str:
        """As text."""
        fields = ("store", "shared", "api_keys", "allow_delete", "max_body_bytes", "spot_check")
        return json.dumps({name: getattr(self, name) for name in fields})

    @classmethod
    def from_environment(cls) -> "MiddlewareConfig":
        """What the environment says; defaults where it says nothing."""
        given = json.loads(os.environ.get(CONFIG_ENV, "{}"))
        return cls(**{**given, "api_keys": tuple(given.get("api_keys", ()))})


class HiddenStatesMiddleware:
    """See the module. vLLM makes it, with the app behind it."""

    def __init__(self, app: Any, config: MiddlewareConfig | None = None) -> None:
        self._app = app
        self._config = config or MiddlewareConfig.from_environment()
        self._options = StoreOptions.parse(self._config.store)
        self._keys = ApiKeys(self._config.api_keys)
        self._handles = Handles(self._options.handover)
        self._room = StoreRoom(self._options)
        self._reaper = Reaper(self._options, self._room)
        self._reaper.start()
        self._desk = RequestDesk(self._options, self._config.shared, self._room)
        self._files = build_files_app(self._options, self._desk.places, allow_delete=self._config.allow_delete)
        self._checks = SpotChecks(self._config.spot_check) if self._config.spot_check else None
        self._weight_changes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        mine = path.startswith("/v1/hidden_states")
        kind = _KINDS.get(path) if scope["type"] == "http" and scope["method"] == "POST" else None
        if scope["type"] == "websocket" and self._keys.caller(Headers(scope=scope)) is None:
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or path in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._keys.caller(Headers(scope=scope))
            if caller is None:
                raise ApiError(
                    401, "no API key, or a wrong one: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
                )
            check_length(Headers(scope=scope), self._config.max_body_bytes)
            if mine:
                scope.setdefault("state", {})["caller"] = caller
                await self._files(scope, receive, send)
                return
            if kind is None:
                await self._pass(scope, receive, send)
                return
            raw = await self._body(receive)
            # looks at the store, which may be a slow network's
            admitted = await asyncio.to_thread(self._desk.admit, raw, kind, caller, scope)
        except ApiError as exc:
            await exc.response()(scope, receive, send)
            return
        if admitted is None:
            await self._app(scope, _replay(raw, receive), send)
            return
        asked = {**scope, "headers": _with_id(scope["headers"], admitted, kind)}
        answer, before = AddHandles(send, admitted, self._handles), self._weight_changes
        try:
            await self._app(asked, _replay(admitted.body, receive), answer)
        finally:
            admitted.end()
        if answer.has_handles:
            self._spot_check(scope, admitted, before)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A route that we have no part in."""
        changes = changes_weights(scope["path"])
        self._weight_changes += changes
        try:
            await self._app(scope, receive, send)
        finally:
            self._weight_changes += changes

    def _spot_check(self, scope: Scope, admitted: Admitted, weight_changes: int) -> None:
        """Check one choice of a request in many; nobody waits for it."""
        if self._checks is None or MARK in scope or not self._checks.due():
            return
        self._checks.start(
            random.choice(admitted.handles),
            json.loads(admitted.body),
            lambda body: ask(self, scope, body),
            lambda: self._weight_changes == weight_changes,
        )

    async def _body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ApiError(499, "the client went away")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._config.max_body_bytes:
                raise too_large(self._config.max_body_bytes)
            if not message.get("more_body"):
                return b"".join(parts)


def _with_id(headers: list[tuple[bytes, bytes]], admitted: Admitted, kind: str) -> list[tuple[bytes, bytes]]:
    """vLLM makes its id of the header, behind the same prefix."""
    kept = [(key, value) for key, value in headers if key.lower() not in (b"x-request-id", b"content-length")]
    name = admitted.name.removeprefix(f"{kind}-").encode()
    return [*kept, (b"x-request-id", name), (b"content-length", str(len(admitted.body)).encode())]


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
