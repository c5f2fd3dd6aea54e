"""What a server (or an offline `LLM`) is set up to do: the keys of `kv_connector_extra_config`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layertap.capture import parsing
from layertap.capture.layers import LayersLike
from layertap.capture.request import SAVE_DTYPES, RequestOptions, check_layers
from layertap.errors import OptionError
from layertap.memory import memory_bytes


def _folders(value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value):
        relative = [folder for folder in value if not Path(folder).is_absolute()]
        if relative:
            raise ValueError(f"expected absolute folders ({relative[0]!r} is relative)")
        return tuple(value)
    raise ValueError("expected true, false or a list of folders")


def _handover(value: Any) -> str:
    if value in ("path", "http") or (isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\0]*", value)):
        return str(value)
    raise ValueError("expected 'path', 'http' or a URL such as 's3://bucket/folder'")


def _path(value: Any) -> str:
    return os.path.expanduser(parsing.text(os.fspath(value) if isinstance(value, os.PathLike) else value))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Where and how files are written. The first four are vLLM's, with its defaults; the others are ours."""

    shared_storage_path: str = parsing.option("/tmp", _path, "the folder of the files")
    allow_custom_save_path: bool | tuple[str, ...] = parsing.option(
        False, _folders, "honour a request's hidden_states_path: anywhere (true) or inside these folders"
    )
    num_writer_threads: int = parsing.option(8, parsing.integer(1), "threads that write files")
    num_writer_processes: int | None = parsing.option(
        None,
        parsing.optional(parsing.integer(1)),
        "vLLM on a GPU: processes that share these threads; default by the number of cores",
    )
    use_synchronization_lock: bool = parsing.option(True, parsing.boolean, "a lock file lets readers wait for the file")
    layers: LayersLike | None = parsing.option(None, parsing.optional(check_layers), "layers to take by default")
    capture_by_default: bool = parsing.option(True, parsing.boolean, "take states unless a request says otherwise")
    save_dtype: str | None = parsing.option(
        None, parsing.optional(parsing.one_of(*SAVE_DTYPES)), "dtype of saved rows; default the compute dtype"
    )
    max_bytes_in_flight: int | None = parsing.option(
        None, parsing.optional(parsing.integer(1)), "rows in memory that are in no file yet; default memory / 8"
    )
    max_storage_bytes: int | None = parsing.option(
        None, parsing.optional(parsing.integer(1)), "quota of the storage folder"
    )
    min_free_bytes: int = parsing.option(
        1 << 30, parsing.integer(0), "a request is refused if the file system would have less left"
    )
    ttl_seconds: float | None = parsing.option(
        None, parsing.optional(parsing.seconds), "files older than this may be removed"
    )
    handover: str = parsing.option(
        "path",
        _handover,
        "how clients get a file: 'path' (shared file system), 'http', or an object store's URL (s3://...)",
    )
    prefix_rows_bytes: int | None = parsing.option(
        None,
        parsing.optional(parsing.integer(1)),
        "vLLM: keep rows of cached blocks in this much memory, and let requests that capture read the prefix cache that far",
    )
    fsync: bool = parsing.option(False, parsing.boolean, "sync each file before it is published")

    @classmethod
    def parse(cls, mapping: Mapping[str, Any] | None) -> "StoreOptions":
        """Check a `kv_connector_extra_config`.

        Raises:
            OptionError: an unknown key or a bad value; the message names it.
        """
        return parsing.parse_fields(cls, {} if mapping is None else mapping, "kv_connector_extra_config")

    def capture_of(self, kv_transfer_params: Mapping[str, Any] | None, *, stores: bool) -> RequestOptions | None:
        """A request's options; None where nothing is to be taken.

        Args:
            kv_transfer_params: of the request.
            stores: there is somewhere to write.

        Raises:
            OptionError: a bad option, or there is nowhere to write.
        """
        options = RequestOptions.parse(kv_transfer_params)
        wanted = options.capture
        if wanted is None:
            wanted = self.capture_by_default and (stores or kv_transfer_params is not None)
        if not wanted:
            return None
        if not stores:
            raise OptionError(
                "kv_transfer_params: this LLM was made without a storage; give storage=... or kv_transfer_config=..., or use "
                "extract(), which returns the rows in memory"
            )
        return options

    def byte_budget(self) -> int:
        """`max_bytes_in_flight`, or an eighth of the machine's memory."""
        if self.max_bytes_in_flight is not None:
            return self.max_bytes_in_flight
        return memory_bytes() // 8
