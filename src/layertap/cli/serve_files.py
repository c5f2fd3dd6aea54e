"""`layertap serve-files`: a storage folder over HTTP, beside a server that only writes to it."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from layertap.cli.reporting import errors_explained
from layertap.cli.serve import API_KEY_ENV


def serve_files(
    folder: Annotated[Path, typer.Argument(help="The storage.", show_default=False)],
    host: Annotated[str, typer.Option(help="0.0.0.0 is reached from other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8001,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Asked of every request but /health (again for more); or ${API_KEY_ENV}."),
    ] = None,
    allow_delete: Annotated[bool, typer.Option("--allow-delete", help="Clients may free their files.")] = False,
) -> None:
    """Hand the files of a storage over by HTTP: GET /v1/hidden_states/ID.

    Example: layertap serve-files /dev/shm/hs --port 8001
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    keys = tuple(api_key or ()) or tuple(key for key in [os.environ.get(API_KEY_ENV, "")] if key)
    with errors_explained():
        from layertap.serving.files_app import serve_folder

        serve_folder(folder, host=host, port=port, api_keys=keys, allow_delete=allow_delete)
