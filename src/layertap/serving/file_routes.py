"""`/v1/hidden_states/...`: files over HTTP.

| answer | when |
| --- | --- |
| 200, 206 | the file, or a range of it; `ETag` is its digest |
| 202 | it is being written; `?wait=SECONDS` (or `Prefer: wait=SECONDS`) waits for it first, up to 60 |
| 303 | it went to object storage, `Location` says where |
| 404 | unknown, or not the caller's |
| 409 | `DELETE` of what is being written, or read for longer than a second |
| 410 | it will not come; the message is the reason |
"""

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import FileIO
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from layertap.serving.api_errors import ApiError
from layertap.serving.handoff import FileDesk, FileState
from layertap.serving.identity import Caller

MAX_WAIT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_PREFERRED = re.compile(r"(?:^|[,;])\s*wait\s*=\s*(\d{1,9})(?=\s*(?:$|[,;]))")
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.002, 0.05
_IDLE_WITHIN_SECONDS = 1.0
_DESCRIBED: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (202, "It is being written."),
        (206, "A range of it."),
        (303, "It is in object storage."),
        (304, "The caller has it already."),
        (400, "A parameter is wrong."),
        (401, "No API key, or a wrong one."),
        (403, "This server doesn't allow it."),
        (404, "Unknown, or not the caller's."),
        (409, "It is being written or read."),
        (410, "It will not come; the message is the reason."),
        (412, "It is another file by now."),
        (416, "The range is outside."),
        (503, "The object store doesn't answer."),
    )
}


def file_routes(desk: FileDesk, *, allow_delete: bool) -> APIRouter:
    """The routes over one store.

    Args:
        desk: finds the files.
        allow_delete: `DELETE` is answered.
    """
    router = APIRouter(prefix="/v1/hidden_states")
    whole = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    read: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", "content": whole}}
    read |= {status: _DESCRIBED[status] for status in (202, 206, 303, 304, 400, 401, 404, 410, 412, 416, 503)}

    async def answer(name: str, request: Request, wait: float) -> Response:
        caller: Caller = request.state.caller
        deadline = asyncio.get_running_loop().time() + wait
        pause = _FIRST_PAUSE_SECONDS
        while True:
            found, response = await asyncio.to_thread(_look, desk, name, caller, request)
            left = deadline - asyncio.get_running_loop().time()
            if found.state != "writing" or left <= 0:
                return response if response is not None else _not_ready(found)
            ended = desk.ended(name)
            if ended is None:  # another process writes it: look again
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
            else:
                await asyncio.wait([asyncio.wrap_future(ended)], timeout=left)

    wait_query = Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for a file that is being written.")

    @router.get("/tags/{tag}", summary="What a tag stands for", responses={404: _DESCRIBED[404], 401: _DESCRIBED[401]})
    async def by_tag(tag: str, request: Request) -> JSONResponse:
        record = await asyncio.to_thread(desk.tag, tag, request.state.caller)
        if record is None:
            raise ApiError(404, "no request with this tag", code="not_found")
        return JSONResponse(record)

    @router.get("/{name}", summary="The file of a request", response_class=Response, responses=read)
    async def get(name: str, request: Request, wait: Annotated[float, wait_query] = 0.0) -> Response:
        return await answer(name, request, max(wait, _preferred_wait(request)))

    @router.head("/{name}", summary="Whether it is there", response_class=Response, responses=read)
    async def head(name: str, request: Request, wait: Annotated[float, wait_query] = 0.0) -> Response:
        return await answer(name, request, max(wait, _preferred_wait(request)))

    @router.delete(
        "/{name}",
        summary="Free it",
        status_code=204,
        responses={status: _DESCRIBED[status] for status in (401, 403, 404, 409, 503)},
    )
    async def delete(name: str, request: Request) -> Response:
        if not allow_delete:
            raise ApiError(
                403, "this server's files are read-only; its option --allow-delete changes that", code="read_only"
            )
        # who just got the last byte finds a lock still held for a moment: the answer's, the writer's, the reaper's
        deadline = asyncio.get_running_loop().time() + _IDLE_WITHIN_SECONDS
        while not await asyncio.to_thread(_remove, desk, name, request.state.caller):
            if asyncio.get_running_loop().time() >= deadline:
                raise _busy()
            await asyncio.sleep(_LAST_PAUSE_SECONDS)
        return Response(status_code=204)

    return router


def _look(desk: FileDesk, name: str, caller: Caller, request: Request) -> tuple[FileState, Response | None]:
    """Find a file and open it, in one go on one thread."""
    found = desk.look(name, caller)
    return found, _file_answer(desk, found, request) if found.state == "ready" else None


def _remove(desk: FileDesk, name: str, caller: Caller) -> bool:
    found = desk.look(name, caller)
    if found.state == "missing":
        raise _unknown()
    if found.state == "writing":
        raise _busy()
    return desk.remove(found)


def _busy() -> ApiError:
    return ApiError(409, "it is being written or read; try again later", code="busy", headers={"retry-after": "1"})


def _preferred_wait(request: Request) -> float:
    """The seconds of `Prefer: wait=SECONDS` (RFC 7240), a wish: what isn't understood is no error."""
    match = _PREFERRED.search(request.headers.get("prefer", ""))
    return min(float(match[1]), MAX_WAIT_SECONDS) if match else 0.0


def _unknown() -> ApiError:
    return ApiError(404, "no such hidden states: unknown, expired, deleted, or not yours", code="not_found")


def _not_ready(found: FileState) -> Response:
    if found.state == "writing":
        body = {"id": found.name, "state": "writing"}
        return JSONResponse(body, 202, headers={"retry-after": "1", "cache-control": "no-store"})
    if found.state == "shipped":
        body = {"id": found.name, "state": "shipped", "hidden_states_url": found.reason or ""}
        return JSONResponse(body, 303, headers={"location": found.reason or ""})
    if found.state == "failed":
        raise ApiError(410, f"these hidden states will not come: {found.reason}", code="failed")
    raise _unknown()


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


def _file_answer(desk: FileDesk, found: FileState, request: Request) -> Response:
    assert found.path is not None
    try:
        file = open(found.path, "rb", buffering=0, opener=_open_for_reading)  # noqa: SIM115 - a long answer keeps it open
    except FileNotFoundError:
        raise _unknown() from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the reaper leaves it alone while it is read
        response = _open_answer(desk, found, request, file)
    except BaseException:
        file.close()
        raise
    if not isinstance(response, _FileAnswer):
        file.close()
    return response


def _open_for_reading(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)


def _open_answer(desk: FileDesk, found: FileState, request: Request, file: FileIO) -> Response:
    assert found.header is not None
    size = os.fstat(file.fileno()).st_size
    etag = f'"{found.header.digest}"'
    headers = {
        "etag": etag,
        "accept-ranges": "bytes",
        "cache-control": "private, no-transform",
        "content-type": "application/octet-stream",
        "x-layertap-rows": str(found.header.info.num_rows),
    }
    wanted = request.headers
    if (match := wanted.get("if-match")) is not None and not _names(match, etag):
        raise ApiError(412, "it is another file by now", code="changed", headers={"etag": etag})
    if (none := wanted.get("if-none-match")) is not None and _names(none, etag):
        return Response(status_code=304, headers=headers)
    asked = wanted.get("range") if wanted.get("if-range", etag) == etag and request.method == "GET" else None
    part = None if asked is None else _part(asked, size)
    status, span = (200, _Span(0, size)) if part is None else (206, part)
    headers["content-length"] = str(span.end - span.start)
    if status == 206:
        headers["content-range"] = f"bytes {span.start}-{span.end - 1}/{size}"
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    # a range to the end delivers the file if it goes on with a transfer, and not where somebody looks at its last rows
    whole = span.end == size and (span.start == 0 or "if-match" in wanted or "if-range" in wanted)
    if span.end - span.start <= _CHUNK_BYTES:
        body = os.pread(file.fileno(), span.end - span.start, span.start)
        if len(body) < span.end - span.start:
            raise ApiError(500, "the file was cut off while it was read", code="store_error")
        if whole:
            desk.note_fetched(found.name)
        return Response(body, status_code=status, headers=headers)
    return _FileAnswer(desk, found.name, file, span, whole=whole, status=status, headers=headers)


def _names(header: str, etag: str) -> bool:
    return header.strip() == "*" or etag in (part.strip().removeprefix("W/") for part in header.split(","))


def _part(asked: str, size: int) -> _Span | None:
    """One range; several, another unit, or one that ends before it begins are answered with the whole file, as HTTP asks for."""
    match = _RANGE.fullmatch(asked.strip())
    if match is None or not (match[1] or match[2]) or (match[1] and match[2] and int(match[2]) < int(match[1])):
        return None
    if not match[1]:
        span = _Span(max(0, size - int(match[2])), size)
    else:
        span = _Span(int(match[1]), min(size, int(match[2]) + 1) if match[2] else size)
    if span.start >= span.end:
        raise ApiError(
            416,
            f"the range {asked!r} is outside of the file's {size} bytes",
            code="range",
            headers={"content-range": f"bytes */{size}"},
        )
    return span


class _FileAnswer(StreamingResponse):
    """Sends a span of an open file and closes it in every case."""

    def __init__(
        self,
        desk: FileDesk,
        name: str,
        file: FileIO,
        span: _Span,
        *,
        whole: bool,
        status: int,
        headers: dict[str, str],
    ) -> None:
        self._desk = desk
        self._name = name
        self._file = file
        self._whole = whole
        super().__init__(self._chunks(span), status_code=status, headers=headers)

    async def _chunks(self, span: _Span) -> AsyncIterator[bytes]:
        at = span.start
        while at < span.end:
            data = await asyncio.to_thread(os.pread, self._file.fileno(), min(_CHUNK_BYTES, span.end - at), at)
            if not data:
                raise OSError(f"{self._name} was cut off while it was sent")
            at += len(data)
            yield data
        if self._whole:
            self._desk.note_fetched(self._name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()
