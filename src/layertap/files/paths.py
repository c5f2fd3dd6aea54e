"""Names of files: no request id, tag or client's path can leave the folder it belongs in."""

import hashlib
import logging
import os
import secrets
import urllib.parse
from pathlib import Path

from layertap.capture.options import StoreOptions
from layertap.errors import OptionError

SUFFIX = ".safetensors"
LOCK_SUFFIX = ".lock"
ERROR_SUFFIX = ".error"
TEMP_SUFFIX = ".layertap-tmp"
QUARANTINE_SUFFIX = ".quarantined"
TAGS_FOLDER = "tags"
_BESIDE = (LOCK_SUFFIX, ERROR_SUFFIX, TEMP_SUFFIX, QUARANTINE_SUFFIX)
_MAX_NAME_BYTES = 180  # leaves room for suffixes under the usual limit of 255

logger = logging.getLogger(__name__)


def new_request_id(prefix: str = "hs") -> str:
    """A request id with 64 random bits: several processes share one folder."""
    return f"{prefix}-{secrets.token_hex(8)}"


def whole_path(path: str | os.PathLike[str]) -> Path:
    """The path from the root on; `~` is the home folder."""
    return Path(os.path.expanduser(path)).absolute()


def safe_name(request_id: str) -> str:
    """A file name for any request id: percent-encoded, never hidden, never too long; distinct ids stay distinct."""
    name = urllib.parse.quote(request_id, safe="", errors="surrogatepass")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME_BYTES or not name:
        digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        name = f"{name[: _MAX_NAME_BYTES - 33]}-{digest}"
    return name


def check_folder(folder: Path, option: str) -> None:
    """Refuse a storage that can't hold files, before anything is computed for it. It needn't be there yet.

    Args:
        folder: the storage.
        option: its name in the message.

    Raises:
        OptionError: a file is in its place, or this user may not write there.
    """
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not nearest.is_dir():
        raise OptionError(f"{option}: {nearest} is a file, expected a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OptionError(f"{option}: this user may not write to {nearest}; give another folder")


def target_path(options: StoreOptions, request_id: str, custom: str | None) -> Path:
    """Where a request's file goes.

    Args:
        options: the store's options.
        request_id: made safe here.
        custom: the request's `hidden_states_path`; ignored with a warning unless allowed, as vLLM documents it.

    Raises:
        OptionError: the path is allowed only inside given folders, and leaves them; or its name means something else to the store.
    """
    default = Path(os.path.abspath(options.shared_storage_path)) / (safe_name(request_id) + SUFFIX)
    if custom is None:
        return default
    allowed = options.allow_custom_save_path
    if allowed is False:
        logger.warning(
            "hidden_states_path %r is ignored: allow_custom_save_path is off; the file goes to %s", custom, default
        )
        return default
    path = Path(os.path.abspath(custom))
    if custom.endswith("/") or path.is_dir():
        raise OptionError(f"kv_transfer_params.hidden_states_path: {custom!r} is a folder, expected a file's name")
    if path.name.endswith(_BESIDE):
        raise OptionError(
            f"kv_transfer_params.hidden_states_path: {custom!r} ends like what stands beside a file "
            f"({', '.join(_BESIDE)}); take a name that ends in {SUFFIX}"
        )
    real_parent = Path(os.path.realpath(path.parent))
    if real_parent.is_relative_to(Path(os.path.realpath(options.shared_storage_path), TAGS_FOLDER)):
        raise OptionError(f"kv_transfer_params.hidden_states_path: {custom!r} is where tags are; take another folder")
    if allowed is True:
        return path
    if not any(real_parent.is_relative_to(os.path.realpath(folder)) for folder in allowed):
        raise OptionError(
            f"kv_transfer_params.hidden_states_path: {custom!r} is outside the allowed folders {list(allowed)}"
        )
    return real_parent / path.name


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no reader takes for a finished file."""
    start = os.fsencode(path.name)[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return path.with_name(f".{start}.{secrets.token_hex(4)}{TEMP_SUFFIX}")


def error_path(path: Path) -> Path:
    """Where the reason stands if `path` can't be published."""
    return path.with_name(path.name + ERROR_SUFFIX)


def quarantine_path(path: Path) -> Path:
    """A new name beside `path` for a file that was found wrong; readers refuse it."""
    start = os.fsencode(path.name)[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return path.with_name(f"{start}.{secrets.token_hex(4)}{QUARANTINE_SUFFIX}")
