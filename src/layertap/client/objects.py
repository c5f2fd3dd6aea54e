"""Files in object storage, through fsspec."""

from tempfile import TemporaryFile

from layertap.files.read import Loaded, read_open_file
from layertap.writing.shipping import open_store

_CHUNK_BYTES = 8 << 20


def load_object(url: str) -> Loaded:
    """Get an object and check it."""
    filesystem, path = open_store(url)
    with TemporaryFile() as file, filesystem.open(path, "rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        return read_open_file(file.fileno(), url)
