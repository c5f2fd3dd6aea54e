"""`POST /v1/weights`: a training loop gives the server new weights; no request ever runs on a mixture.

New requests wait, running ones finish on the weights that they began with, then the weights are exchanged. The file of each request
says its version.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from layertap.errors import ModelError
from layertap.serving.api_errors import ApiError
from layertap.serving.state import ServerState

_POLL_SECONDS = 0.005


class WeightsBody(BaseModel):
    """`POST /v1/weights`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[str, Field(min_length=1, max_length=256)]


class Reloads(Protocol):
    """An engine that can exchange its weights."""

    def reload(self, folder: Path) -> int:
        """Do it; nothing runs meanwhile."""


def weights_routes(state: ServerState) -> APIRouter:
    """The route, over one server."""
    router = APIRouter()
    busy = asyncio.Lock()
    responses: dict[int | str, dict[str, str]] = {
        400: {"description": "Not a checkpoint of this model."},
        401: {"description": "No API key, or a wrong one."},
        403: {"description": "This server doesn't allow it."},
    }

    @router.post("/v1/weights", summary="Exchange the weights", responses=responses)
    async def update(body: WeightsBody) -> JSONResponse:
        folder = _allowed(state, body.path)
        async with busy:
            state.pause()
            try:
                while state.num_let_in or state.front.num_running:
                    await asyncio.sleep(_POLL_SECONDS)
                count = await asyncio.to_thread(_reload, state, folder)
                state.front.weights_version = body.version
            finally:
                state.resume()
        return JSONResponse({"version": body.version, "tensors": count})

    return router


def _allowed(state: ServerState, path: str) -> Path:
    folders = state.settings.allow_weight_updates
    if not folders:
        raise ApiError(
            403, "this server's weights are fixed; its option --allow-weight-updates changes that", code="read_only"
        )
    if "\0" in path:
        raise ApiError(400, "path: holds a NUL", param="path", code="invalid_value")
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise ApiError(403, f"path: {path!r} is outside the folders that --allow-weight-updates names", param="path")
    return real


def _reload(state: ServerState, folder: Path) -> int:
    engine: Reloads = state.front.engine  # type: ignore[assignment]  # the embedded engine; others have no such server
    try:
        return engine.reload(folder)
    except ModelError as exc:
        raise ApiError(400, str(exc), param="path", code="invalid_value") from exc
