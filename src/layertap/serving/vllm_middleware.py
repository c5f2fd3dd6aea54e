"""The ASGI middleware inside `vllm serve`: what a KV connector can't do.

A connector can't answer 400 or 507 and can't add to an answer. This can: it checks `kv_transfer_params` before vLLM sees the
request, gives it an id and a place in the store, and puts the handle on each choice and on each choice's last chunk. It serves the
file routes too. The engine is told where files go by options that only this middleware may set. Imports no engine.
"""

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions
from layertap.errors import LayertapError, TargetExistsError
from layertap.files.claims import taken_by_another
from layertap.files.paths import SUFFIX, target_path
from layertap.files.tags import reserve_tag
from layertap.serving.answers import Handles
from layertap.serving.api_errors import ApiError, from_exception
from layertap.serving.files_app import build_files_app
from layertap.serving.identity import ApiKeys, Caller, new_id
from layertap.serving.reaper import Reaper
from layertap.serving.sse import EventSplitter
from layertap.writing.room import Reservation, StoreRoom

if TYPE_CHECKING:
    from layertap.serving.vllm_room import RequestSizes

logger = logging.getLogger(__name__)

CONFIG_ENV = "LAYERTAP_VLLM_MIDDLEWARE"
ID_KEY, PROMPTS_KEY, PRIVATE = "layertap_id", "layertap_prompts", "layertap_"
ERROR_KEY = "hidden_states_error"
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
    """

    store: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    api_keys: tuple[str, ...] = ()
    allow_delete: bool = False
    max_body_bytes: int = 32 << 20

    def dumps(self) -> str:
        """As text."""
        fields = ("store", "shared", "api_keys", "allow_delete", "max_body_bytes")
        return json.dumps({name: getattr(self, name) for name in fields})

    @classmethod
    def from_environment(cls) -> "MiddlewareConfig":
        """What the environment says; defaults where it says nothing."""
        given = json.loads(os.environ.get(CONFIG_ENV, "{}"))
        return cls(**{**given, "api_keys": tuple(given.get("api_keys", ()))})


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that may go to vLLM.

    Attributes:
        name: its id.
        body: as vLLM gets it.
        handles: per choice, in the order of the answer's indices; empty without capture.
        tag: the tag's record.
        replaces: where the client chose the path: whether an existing file is to be replaced. None with a path of our own, which
            carries 64 random bits and is nobody else's.
    """

    name: str
    body: bytes
    handles: list[dict[str, Any]]
    tag: Path | None = None
    room: Reservation | None = None
    replaces: bool | None = None

    def end(self) -> None:
        """The answer is there, or will not come. What was set aside counts as used until the files are counted anew."""
        if self.room is not None:
            self.room.settle(self.room.num_bytes)

    def answer(self, index: int) -> dict[str, Any]:
        """The handle of a choice that ended, or why there is none: its path may have become another's since we looked."""
        told = self.handles[index]
        if self.replaces is None:
            return told
        path, name = Path(told["hidden_states_path"]), told["hidden_states_id"]
        taken = taken_by_another(path, name, overwrite=self.replaces)
        return told if taken is None else {ERROR_KEY: taken}

    def withdraw(self) -> None:
        """vLLM refused it: its tag is free again."""
        if self.tag is not None:
            self.tag.unlink(missing_ok=True)
        if self.room is not None:
            self.room.settle(0)


class _Places:
    """Where files are whose clients chose their paths, the latest of them."""

    def __init__(self, kept: int = 20_000) -> None:
        self._kept = kept
        self._paths: OrderedDict[str, Path] = OrderedDict()

    def note(self, handles: Iterable[Mapping[str, Any]]) -> None:
        for handle in handles:
            self._paths[handle["hidden_states_id"]] = Path(handle["hidden_states_path"])
        while len(self._paths) > self._kept:
            self._paths.popitem(last=False)

    def where(self, name: str) -> Path | None:
        return self._paths.get(name)

    def failure(self, name: str) -> str | None:
        return None

    def shipped(self, name: str) -> str | None:
        return None

    def ended(self, name: str) -> "Future[None] | None":
        return None

    def note_fetched(self, name: str) -> None:
        """Nothing is done earlier for it."""

    def note_deleted(self, num_bytes: int) -> None:
        """The reaper counts anew in each round."""


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
        self._places = _Places()
        self._sizes: RequestSizes | None = None
        self._files = build_files_app(self._options, self._places, allow_delete=self._config.allow_delete)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        mine = path.startswith("/v1/hidden_states")
        kind = _KINDS.get(path) if scope["type"] == "http" and scope["method"] == "POST" else None
        if scope["type"] != "http" or not (mine or kind):
            await self._app(scope, receive, send)
            return
        try:
            caller = self._keys.caller(Headers(scope=scope))
            if caller is None:
                raise ApiError(
                    401, "no API key, or a wrong one: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
                )
            if mine:
                scope.setdefault("state", {})["caller"] = caller
                await self._files(scope, receive, send)
                return
            assert kind is not None
            raw = await self._body(receive)
            admitted = self._admit(raw, kind, caller, scope)
        except ApiError as exc:
            await exc.response()(scope, receive, send)
            return
        if admitted is None:
            await self._app(scope, _replay(raw, receive), send)
            return
        scope = {**scope, "headers": _with_id(scope["headers"], admitted, kind)}
        try:
            await self._app(scope, _replay(admitted.body, receive), _AddHandles(send, admitted, self._handles))
        finally:
            admitted.end()

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
                raise ApiError(
                    413,
                    f"the body is larger than {self._config.max_body_bytes} bytes, the server's limit; send fewer prompts at once",
                    code="body_too_large",
                )
            if not message.get("more_body"):
                return b"".join(parts)

    def _admit(self, raw: bytes, kind: str, caller: Caller, scope: Scope) -> _Admitted | None:
        """Check and place a request; None where vLLM may say what is wrong with it."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        given = body.get("kv_transfer_params")
        num_prompts, num_choices = _counts(body)
        if (given is not None and not isinstance(given, dict)) or num_prompts is None or num_choices is None:
            return None
        own = {} if given is None else given
        if any(str(key).startswith(PRIVATE) for key in own):
            raise ApiError(400, "kv_transfer_params: unknown option", param="kv_transfer_params", code="invalid_value")
        try:
            options = RequestOptions.parse(own, foreign_keys_allowed=self._config.shared)
            wanted = self._options.capture_by_default if options.capture is None else options.capture
            client_id = body.pop("request_id", None)
            header_id = Headers(scope=scope).get("x-request-id")
            name = new_id(kind, caller, client_id if isinstance(client_id, str) else header_id)
            if wanted and body.get("use_beam_search"):
                if given is not None:
                    raise ApiError(
                        400,
                        "kv_transfer_params: beam search saves no hidden states; run its sequences as prompts with max_tokens=1",
                        param="kv_transfer_params",
                        code="invalid_value",
                    )
                wanted = False
            if not wanted:
                return _Admitted(name, json.dumps(body).encode(), [])
            most = self._sizes_of(scope).most_bytes(body, options, num_prompts, num_choices)
            room = self._room.reserve(target_path(self._options, name, options.hidden_states_path), most)
            try:
                return self._place(body, own, options, name, (num_prompts, num_choices), caller, room)
            except BaseException:
                room.settle(0)
                raise
        except (LayertapError, ValueError, OSError) as exc:
            raise from_exception(exc, path_is_the_clients="hidden_states_path" in own) from exc

    def _sizes_of(self, scope: Scope) -> "RequestSizes":
        if self._sizes is None:  # vLLM has its configuration only once it has started
            from layertap.serving.vllm_room import RequestSizes

            self._sizes = RequestSizes(scope["app"].state.vllm_config)
        return self._sizes

    def _place(
        self,
        body: dict[str, Any],
        own: Mapping[str, Any],
        options: RequestOptions,
        name: str,
        counts: tuple[int, int],
        caller: Caller,
        room: Reservation,
    ) -> _Admitted:
        base = target_path(self._options, name, options.hidden_states_path)
        handles: list[dict[str, Any]] = []
        for place in range(counts[0]):
            for choice in range(counts[1]):
                suffix = f"-{place}-{choice}" if place or choice else ""
                path = base.with_name(f"{base.name.removesuffix(SUFFIX)}{suffix}{SUFFIX}")
                if not options.overwrite and os.path.lexists(path):
                    raise TargetExistsError(f"{path} exists already; `overwrite` would replace it")
                handles.append({"hidden_states_path": str(path), "hidden_states_id": name + suffix})
        replaces = None if options.hidden_states_path is None else options.overwrite
        tag: Path | None = None
        if options.tag is not None:
            tag = reserve_tag(self._options.shared_storage_path, options.tag, name, handles, owner=caller.owner)
        if options.hidden_states_path is not None:
            self._places.note(handles)
        told = {key: value for key, value in own.items() if key != "tag"}
        told |= {"hidden_states_path": str(base), ID_KEY: name, PROMPTS_KEY: counts[0]}
        Path(base).parent.mkdir(parents=True, exist_ok=True)
        return _Admitted(name, json.dumps({**body, "kv_transfer_params": told}).encode(), handles, tag, room, replaces)


def _counts(body: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Prompts and choices of a request; None where they make no sense and vLLM will say so."""
    n = body.get("n")
    num_choices = 1 if n is None else n
    if isinstance(num_choices, bool) or not isinstance(num_choices, int) or not 1 <= num_choices <= 1024:
        return None, None
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if not prompt or len(prompt) > 4096:
            return None, None
        return (1 if isinstance(prompt[0], int) else len(prompt)), num_choices
    return 1, num_choices


def _with_id(headers: list[tuple[bytes, bytes]], admitted: _Admitted, kind: str) -> list[tuple[bytes, bytes]]:
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


class _AddHandles:
    """A `send` that puts handles into what passes: a JSON answer, or a stream's chunks."""

    def __init__(self, send: Send, admitted: _Admitted, sayer: Handles) -> None:
        self._send = send
        self._admitted = admitted
        self._num_handles = len(admitted.handles)
        self._sayer = sayer
        self._start: Message | None = None
        self._streams = False
        self._passes = False
        self._parts: list[bytes] = []
        self._events = EventSplitter()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            kind = headers.get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
            self._passes = not self._num_handles or message["status"] != 200 or not (self._streams or "json" in kind)
            if message["status"] != 200:
                self._admitted.withdraw()
            if self._streams or self._passes:
                await self._send(message)
            else:
                self._start = message
            return
        if message["type"] != "http.response.body" or self._passes:
            await self._send(message)
        elif self._streams:
            done = not message.get("more_body", False)
            data = b"".join(self._event(event) for event in self._events.feed(message.get("body", b""), done))
            await self._send({"type": "http.response.body", "body": data, "more_body": not done})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole()

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {") or b'"finish_reason"' not in event:
            return event
        chunk = json.loads(event[6:])
        changed = False
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason") is not None and choice.get("index", 0) < self._num_handles:
                choice["kv_transfer_params"] = self._handle(choice.get("index", 0))
                if choice.get("index", 0) == 0:
                    chunk["kv_transfer_params"] = choice["kv_transfer_params"]
                changed = True
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" if changed else event

    def _handle(self, index: int) -> dict[str, Any]:
        told = self._admitted.answer(index)
        return told if ERROR_KEY in told else self._sayer.say(told)

    async def _whole(self) -> None:
        assert self._start is not None
        body = b"".join(self._parts)
        answer = json.loads(body)
        if isinstance(answer, dict) and isinstance(answer.get("choices"), list):
            handles = [self._handle(index) for index in range(self._num_handles)]
            for choice, handle in zip(answer["choices"], handles, strict=False):
                choice["kv_transfer_params"] = handle
            answer["kv_transfer_params"] = handles[0]
            body = json.dumps(answer, separators=(",", ":")).encode()
        headers = [(key, value) for key, value in self._start["headers"] if key.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
