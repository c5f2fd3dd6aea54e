"""Tags: a name of the client's choice under which the handles of its request are found, where no answer can carry them.

`<storage>/tags/<tag>.json` is written once, at admission: `{"tag", "request_id", "handles": [...]}`. Whether a file is there yet
is asked of the file itself, its lock and its error twin.
"""

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layertap.errors import OptionError
from layertap.files.paths import TAGS_FOLDER, TEMP_SUFFIX, temporary_path


def tag_path(storage: str, tag: str, owner: str = "") -> Path:
    """Where a tag's record is. Tags are plain names (RequestOptions checks that); so are owners, each with a folder."""
    return Path(storage) / TAGS_FOLDER / owner / f"{tag}.json"


def reserve_tag(storage: str, tag: str, request_id: str, handles: Sequence[dict[str, Any]], *, owner: str = "") -> Path:
    """Write a tag's record; tags are unique per owner.

    Raises:
        OptionError: the tag is taken.
    """
    path = tag_path(storage, tag, owner)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o664), "w") as file:
            json.dump({"tag": tag, "request_id": request_id, "handles": list(handles)}, file)
        os.link(temporary, path)
    except FileExistsError as exc:
        raise OptionError(
            f"kv_transfer_params.tag: {tag!r} is taken by an earlier request; tags are used once"
        ) from exc
    except OSError as exc:
        if exc.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS} or path.exists():
            raise
        temporary.replace(path)  # no hard links here
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_tag(storage: str, tag: str, owner: str = "") -> dict[str, Any] | None:
    """A tag's record, or None."""
    try:
        return dict(json.loads(tag_path(storage, tag, owner).read_text()))
    except FileNotFoundError:
        return None


def expire_tags(storage: str, older_than: float) -> int:
    """Remove records that were written before a time (seconds since the epoch) and whose files are all gone.

    What a process left that was killed while it wrote a record goes, too.

    Returns:
        How many records.
    """
    removed = 0
    for path in (Path(storage) / TAGS_FOLDER).rglob(f".*{TEMP_SUFFIX}"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < older_than:
                path.unlink()
    for path in (Path(storage) / TAGS_FOLDER).rglob("*.json"):
        try:
            if path.stat().st_mtime >= older_than:
                continue
            handles = json.loads(path.read_text())["handles"]
            if not any(Path(handle["hidden_states_path"]).exists() for handle in handles):
                path.unlink()
                removed += 1
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not ours, or gone meanwhile
    return removed
