"""`layertap serve-files`: a storage folder over HTTP, beside a server that only writes to it."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from layertap.cli.options import AllowDelete, ApiKey, Host, Port
from layertap.cli.reporting import errors_explained


def serve_files(
    folder: Annotated[Path, typer.Argument(help="The storage.", show_default=False)],
    host: Host = "127.0.0.1",
    port: Port = 8001,
    api_key: ApiKey = None,
    allow_delete: AllowDelete = False,
) -> None:
    """Hand the files of a storage over by HTTP: GET /v1/hidden_states/ID.

    Example: layertap serve-files /dev/shm/hs --port 8001
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with errors_explained():
        from layertap.serving.files_app import serve_folder
        from layertap.serving.settings import api_keys

        serve_folder(folder, host=host, port=port, api_keys=api_keys(api_key), allow_delete=allow_delete)
