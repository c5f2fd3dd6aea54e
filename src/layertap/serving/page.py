"""The page at `/`: the running server for a person. Read-only; what it shows is also JSON."""

import asyncio
import shutil
import time
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from layertap.errors import HiddenStatesError
from layertap.files.format import Header
from layertap.files.read import read_header
from layertap.files.values import to_float32
from layertap.serving.api_errors import ApiError
from layertap.serving.book import Entry
from layertap.serving.identity import Caller
from layertap.serving.state import ServerState

_SHOWN = 12
_MOST_POSITIONS = 160
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@cache
def _html() -> str:
    return resources.files("layertap.serving").joinpath("page.html").read_text(encoding="utf-8")


def page_routes(state: ServerState) -> APIRouter:
    """The page, and what it asks for."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> HTMLResponse:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-store"}
        return HTMLResponse(_html(), headers=headers)

    @router.get("/page/status")
    async def status(request: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(_status, state, request.state.caller))

    @router.get("/page/picture/{name}")
    async def picture(name: str, request: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(_picture, state, name, request.state.caller))

    return router


def _status(state: ServerState, caller: Caller) -> dict[str, Any]:
    front, totals = state.front, state.book.totals
    info, room, budget = front.info, front.recorder.room, front.recorder.budget
    mine = [entry for entry in state.book.latest(20 * _SHOWN) if caller.may_see(entry.name)]
    failures = [entry for entry in reversed(state.book.failures.copy()) if caller.may_see(entry.name)]
    return {
        "now": time.time(),
        "started": state.started,
        "model": state.names[0],
        "num_layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "dtype": info.dtype,
        "device": info.device,
        "engine": f"{info.engine} {info.engine_version}",
        "weights_version": front.weights_version,
        "layers": list(front.default_layers),
        "tokens": state.metrics.num_tokens(),
        "running": front.num_running,
        "files": {"writing": state.book.num_writing, **totals.files},
        "rows": totals.rows,
        "bytes": totals.num_bytes,
        "in_flight_bytes": budget.in_flight_bytes,
        "in_flight_limit": budget.limit_bytes,
        "ttl_seconds": front.options.ttl_seconds,
        "store": {
            "folder": str(room.folder),
            "used_bytes": room.used_bytes,
            "reserved_bytes": room.reserved_bytes,
            "quota_bytes": room.quota_bytes,
            "free_bytes": _free(room.folder),
        },
        "latest": [_entry(entry) for entry in mine[:_SHOWN]],
        "failures": _grouped(failures)[:_SHOWN],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "state": entry.state,
        "rows": entry.num_rows,
        "bytes": entry.num_bytes,
        "layers": list(entry.layers),
        "admitted": entry.admitted,
        "ended": entry.ended,
        "reason": entry.reason,
        "kind": entry.kind,
    }


def _grouped(failures: list[Entry]) -> list[dict[str, Any]]:
    """The latest of each reason with their number, so that clients that leave don't hide a full disk."""
    found: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    for entry in failures:
        group = found.setdefault((entry.kind, entry.reason), {**_entry(entry), "count": 0})
        group["count"] += 1
    return list(found.values())


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _picture(state: ServerState, name: str, caller: Caller) -> dict[str, Any]:
    found = state.desk.look(name, caller)
    if found.state != "ready" or found.path is None:
        raise ApiError(404, f"no picture: the file is {found.reason or found.state}", code="not_found")
    try:
        header = read_header(found.path)
        return _norms(found.path, header)
    except (OSError, HiddenStatesError) as exc:
        raise ApiError(404, f"no picture: {exc}", code="not_found") from exc


def _norms(path: Path, header: Header) -> dict[str, Any]:
    """How long the rows are, by layer and position; of a long file some positions, evenly spread."""
    info = header.info
    if not info.num_rows:
        raise ApiError(404, "no picture: the file has no rows", code="not_found")
    if info.packed is not None:
        raise ApiError(404, "no picture: the file's rows are compressed; layertap inspect shows them", code="not_found")
    picked = np.unique(np.linspace(0, info.num_rows - 1, min(info.num_rows, _MOST_POSITIONS)).astype(int))
    raw = np.memmap(path, np.uint8, "r", header.data_offset, (info.num_rows, info.row_bytes))
    rows = to_float32(raw[picked].reshape(len(picked), len(info.layers), -1), info.dtype)
    norms = np.linalg.norm(np.nan_to_num(rows.astype(np.float64), nan=0.0, posinf=3e38, neginf=-3e38), axis=-1).T
    return {
        "layers": list(info.layers),
        "first": info.first_position,
        "last": info.first_position + info.num_rows - 1,
        "sampled": len(picked) < info.num_rows,
        "norms": [[float(f"{norm:.6g}") for norm in row] for row in norms],
    }
