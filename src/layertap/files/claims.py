"""Whether a path may be handed out as a request's: somebody else's file may have come into being after a check.

Asked where nothing may wait. Only what speaks against it counts: a writer that is late with its reservation is no proof.
"""

import os
from pathlib import Path

from layertap.errors import HiddenStatesError
from layertap.files.locks import is_held, lock_path, read_content
from layertap.files.read import read_header


def taken_by_another(path: Path, request_id: str, *, overwrite: bool = False) -> str | None:
    """Why `path` isn't the one of `request_id`, or None where nothing speaks against it.

    Args:
        path: where the request's file is, or will be.
        request_id: as its lock and its metadata name it.
        overwrite: an existing file is one that the request replaces.
    """
    lock = lock_path(path)
    content = read_content(lock)
    if content is not None:
        if content.request_id == request_id:
            return None
        if is_held(lock):
            return f"{path} is being written by another request ({content.request_id}); nothing was replaced"
    if overwrite or not os.path.lexists(path):
        return None
    try:
        if read_header(path).info.facts.get("request_id") == request_id:
            return None
    except (HiddenStatesError, OSError):
        pass  # no file of ours at all
    return f"{path} came into being meanwhile, and is another's; nothing was replaced"
