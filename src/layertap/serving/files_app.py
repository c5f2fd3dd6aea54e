"""The file routes alone, over a folder: beside a server that writes to it, and inside vLLM's. Imports no engine."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from layertap import __version__
from layertap.capture.options import StoreOptions
from layertap.errors import OptionError
from layertap.serving.error_handlers import add_error_handlers
from layertap.serving.file_routes import file_routes
from layertap.serving.gate import Gate
from layertap.serving.handoff import FileDesk, Known
from layertap.serving.identity import ApiKeys

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 16


def build_files_app(options: StoreOptions, known: Known | None = None, *, allow_delete: bool = False) -> FastAPI:
    """Make the app of the file routes; callers are what a `Gate` in front says.

    Args:
        options: the store's; only its folder counts.
        known: what a server around it knows.
        allow_delete: `DELETE` is answered.
    """
    app = FastAPI(title="layertap files", version=__version__)
    add_error_handlers(app)
    app.include_router(file_routes(FileDesk(options, known), allow_delete=allow_delete))

    @app.get("/health", summary="200 once requests are answered")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ready"})

    return app


def gated_files_app(folder: Path, *, api_keys: Sequence[str] = (), allow_delete: bool = False) -> Any:
    """The same behind API keys.

    Raises:
        OptionError: no such folder.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder}: there is no such folder")
    app = build_files_app(StoreOptions(shared_storage_path=str(folder)), allow_delete=allow_delete)
    return Gate(app, ApiKeys(api_keys), _MAX_BODY_BYTES)


def serve_folder(folder: Path, *, host: str, port: int, api_keys: Sequence[str], allow_delete: bool) -> None:
    """Serve until SIGTERM or SIGINT."""
    from layertap.serving.listening import Server, bind, run, signals_end_the_server, url_of, warn_if_open

    warn_if_open(host, api_keys, "read the files")
    app = gated_files_app(folder, api_keys=api_keys, allow_delete=allow_delete)
    claimed = bind(host, port)
    address = url_of(host, claimed)
    try:
        with signals_end_the_server():
            run(Server(app, partial(logger.info, "serving the files of %s at %s", folder, address)), claimed)
    finally:
        claimed.close()
