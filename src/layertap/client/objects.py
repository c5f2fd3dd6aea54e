"""Files in object storage, through fsspec."""

import json
from tempfile import TemporaryFile
from typing import Any

from layertap.errors import LayertapError
from layertap.files.read import Loaded, read_open_file

_CHUNK_BYTES = 8 << 20


def object_state(url: str) -> str | None:
    """Return "" where the object is there, the reason where it never will be, None where neither is known yet."""
    filesystem, path = _open_store(url)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        return ""
    if filesystem.exists(path + ".error"):
        return str(json.loads(filesystem.cat_file(path + ".error"))["reason"])
    return None


def load_object(url: str) -> Loaded:
    """Get an object and check it."""
    filesystem, path = _open_store(url)
    with TemporaryFile() as file, filesystem.open(path, "rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        return read_open_file(file.fileno(), url)


def _open_store(url: str) -> tuple[Any, str]:
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise LayertapError(f"{url}: object storage needs fsspec: pip install 'layertap[s3]'") from None
    filesystem, path = fsspec.core.url_to_fs(url)
    return filesystem, str(path)
