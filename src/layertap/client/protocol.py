"""What the clients do, written once: generators that yield what is to be done. Each client does it in its way."""

import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

import httpx

from layertap.client.errors import error_of, raise_for, raise_for_file, retry_after
from layertap.client.landing import Landing
from layertap.client.objects import load_object
from layertap.errors import HiddenStatesError, LayertapError, TornError, WaitTimeoutError
from layertap.files.paths import ERROR_SUFFIX, LOCK_SUFFIX
from layertap.files.read import Loaded, read_file, read_open_file
from layertap.files.values import to_tensors
from layertap.writing.shipping import object_state

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Handle = Any
"""A choice of an answer (this client's or the openai client's, a stream's last chunk too), its kv_transfer_params, or an id."""

_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_UNREAD_STATUS = frozenset({429, 503})
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 5.0
_WAIT_SECONDS = 30.0


class Send:
    """Send a request.

    The answer comes back with its body read (or, with `into`, written to a file as it came; `layertap_broken` says what broke it
    off), or the error of the transport.
    """

    def __init__(self, method: str, path: str, *, into: Landing | None = None, **parts: Any) -> None:
        self.method = method
        self.path = path
        self.into = into
        self.parts = parts


class Sleep:
    """Let time pass."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Call:
    """Do something that blocks and is no HTTP (a file system); with `quick`, for less time than another thread would take."""

    def __init__(self, work: Callable[[], Any], *, quick: bool = False) -> None:
        self.work = work
        self.quick = quick


# The logic is written once, as generators that yield what is to be done; the two clients do it, each in its way.
Steps = Generator[Send | Sleep | Call, Any, T]


class Protocol:
    """The steps of each method; see HiddenStatesClient for what they mean."""

    def __init__(self, retries: int, read_timeout: float | None) -> None:
        self._retries = retries
        # the server is asked to wait for a file, but not for so long that the transport gives up
        self._wait_seconds = _WAIT_SECONDS if read_timeout is None else min(_WAIT_SECONDS, read_timeout / 2)

    def generate(self, path: str, body: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        if body.get("stream"):
            raise ValueError("stream: this client returns whole answers; use the openai client for streams")
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(self._retries + 1):
            answer = yield Send("POST", path, json=dict(body))
            if isinstance(answer, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
                failure: Exception = LayertapError(f"the server can't be reached: {type(answer).__name__}: {answer}")
            elif isinstance(answer, httpx.TransportError):
                raise LayertapError(
                    f"the connection broke while the answer was awaited ({type(answer).__name__}); whether it was generated isn't "
                    "known. With kv_transfer_params.tag its files could be found"
                ) from answer
            elif answer.status_code in _UNREAD_STATUS:
                failure = error_of(answer)
                pause = max(pause, retry_after(answer))
            else:
                raise_for(answer)
                return cast(dict[str, Any], answer.json())
            if attempt < self._retries:
                yield Sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        raise failure

    def read(
        self, method: str, path: str, *, retried: frozenset[int] = _RETRIED_STATUS, **parts: Any
    ) -> Steps[httpx.Response]:
        """Send what may be repeated at will."""
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(self._retries + 1):
            answer = yield Send(method, path, **parts)
            last = attempt == self._retries
            if isinstance(answer, httpx.TransportError):
                if last:
                    raise LayertapError(f"{method} {path}: {type(answer).__name__}: {answer}") from answer
            elif answer.status_code not in retried or last:
                return cast(httpx.Response, answer)
            yield Sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def wait(self, handle: Handle, timeout: float) -> Steps[None]:
        name = _name(handle)
        url = _object_url(handle)
        if url is not None:
            yield from self._wait_for_object(url, timeout)
            return
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            waited = f"{min(left, self._wait_seconds):.3f}"
            answer = yield from self.read("HEAD", f"/v1/hidden_states/{name}", params={"wait": waited})
            if answer.status_code != 202:
                if answer.status_code >= 400:  # a HEAD has no body to say why
                    answer = yield from self.read("GET", f"/v1/hidden_states/{name}")
                raise_for_file(answer, name)
                return
            if left <= 0:
                raise WaitTimeoutError(f"{name}: still being written after {timeout:g} s", request_id=name)

    def fetch(self, handle: Handle, timeout: float, *, local: bool) -> Steps[Loaded]:
        url = _object_url(handle)
        if url is not None:
            yield from self._wait_for_object(url, timeout)
            return cast(Loaded, (yield Call(lambda: load_object(url))))
        fields: Mapping[str, Any] = {} if isinstance(handle, str) else _fields(handle)
        path, name = fields.get("hidden_states_path"), fields.get("hidden_states_id")
        if (
            local
            and path is not None
            and any(os.path.exists(path + suffix) for suffix in ("", LOCK_SUFFIX, ERROR_SUFFIX))
        ):
            try:
                found = cast(Loaded, (yield Call(lambda: read_file(path, timeout=timeout))))
            except PermissionError:
                pass  # another user's: the server may read it
            else:
                # else another request's by now, or this machine's own file of that name: the server knows
                if name is None or found.info.facts.get("request_id", name) == name:
                    return found
        with Landing() as file:
            moved_to = yield from self._download(_name(handle), file, timeout)
            if moved_to is not None:
                return cast(Loaded, (yield Call(lambda: load_object(moved_to))))
            check = Call(lambda: read_open_file(file.fileno(), _name(handle)), quick=file.is_small)
            return cast(Loaded, (yield check))

    def _download(self, name: str, file: Landing, timeout: float) -> Steps[str | None]:
        """Wait for the file and get it, going on where a connection broke as long as it is the same file.

        Returns the URL of an object store where it is there.
        """
        etag: str | None = None
        pause = _FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + timeout
        attempt = 0
        while True:
            left = max(0.0, deadline - time.monotonic())
            waited = {"wait": f"{min(left, self._wait_seconds):.3f}"}
            headers = {"accept-encoding": "identity"}
            start = file.size
            if etag is not None:
                headers |= {"range": f"bytes={start}-", "if-match": etag}
            answer = yield Send("GET", f"/v1/hidden_states/{name}", headers=headers, params=waited, into=file)
            broken: Exception | None
            if isinstance(answer, httpx.TransportError):
                broken = answer
            elif answer.status_code in _RETRIED_STATUS:
                broken = error_of(answer)
            elif answer.status_code == 202:
                if left <= 0:
                    raise WaitTimeoutError(f"{name}: still being written after {timeout:g} s", request_id=name)
                continue
            elif answer.status_code == 303:
                return cast(str, answer.headers["location"])
            elif answer.status_code == 412 or (answer.status_code == 200 and start):
                broken = HiddenStatesError(f"{name}: the file was replaced while it was read")
                file.clear()
                etag = None
            else:
                raise_for_file(answer, name)
                etag = answer.headers.get("etag")
                broken = getattr(answer, "layertap_broken", None)
                if broken is None:
                    return None
            attempt += 1
            if attempt > self._retries:
                raise TornError(f"{name}: the transfer broke off {attempt} times: {broken}", request_id=name)
            yield Sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def _wait_for_object(self, url: str, timeout: float) -> Steps[None]:
        deadline = time.monotonic() + timeout
        pause = 0.02
        while True:
            reason = yield Call(lambda: object_state(url))
            if reason == "":
                return
            if reason is not None:
                raise HiddenStatesError(f"{url}: {reason}", reason=reason)
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(f"{url}: not there after {timeout:g} s")
            yield Sleep(pause)
            pause = min(2 * pause, 1.0)

    def find(self, tag: str) -> Steps[list[dict[str, Any]]]:
        answer = yield from self.read("GET", f"/v1/hidden_states/tags/{quote(tag, safe='')}")
        raise_for(answer)
        return cast(list[dict[str, Any]], answer.json()["handles"])

    def delete(self, handle: Handle) -> Steps[None]:
        answer = yield from self.read("DELETE", f"/v1/hidden_states/{_name(handle)}", retried=_RETRIED_STATUS | {409})
        if answer.status_code != 404:  # gone is what was wanted, also where an earlier attempt did it
            raise_for(answer)

    def models(self) -> Steps[list[dict[str, Any]]]:
        answer = yield from self.read("GET", "/v1/models")
        raise_for(answer)
        return cast(list[dict[str, Any]], answer.json()["data"])

    def update_weights(self, path: str, version: str) -> Steps[dict[str, Any]]:
        answer = yield from self.read("POST", "/v1/weights", json={"path": path, "version": version})
        raise_for(answer)
        return cast(dict[str, Any], answer.json())


def _fields(handle: Handle) -> Mapping[str, Any]:
    if not isinstance(handle, Mapping):
        inner = getattr(handle, "kv_transfer_params", None)
        return inner if isinstance(inner, Mapping) else {}
    inner = handle.get("kv_transfer_params")
    return inner if isinstance(inner, Mapping) else handle


def _name(handle: Handle) -> str:
    name = handle if isinstance(handle, str) else _fields(handle).get("hidden_states_id")
    if not isinstance(name, str) or not name:
        raise ValueError(f"handle: expected a choice, its kv_transfer_params or an id, got {handle!r}")
    return quote(name, safe="")


def _object_url(handle: Handle) -> str | None:
    url = None if isinstance(handle, str) else _fields(handle).get("hidden_states_url")
    return url if isinstance(url, str) and "://" in url else None


def as_tensors(loaded: Loaded) -> "dict[str, torch.Tensor]":
    """What `load_hidden_states` returns."""
    import torch

    return to_tensors(loaded.rows, loaded.info.dtype) | {"token_ids": torch.from_numpy(loaded.token_ids)}


def key_headers(api_key: str | None) -> dict[str, str]:
    """The headers that carry a key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}
