"""Reading: wait for the writer, check, deliver; or say why not.

`load_hidden_states` is drop-in for vLLM's function of that name. Unlike it, it never waits for ever, checks every byte, and raises
the writer's reason where there is one.
"""

import contextlib
import json
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layertap.errors import (
    CorruptError,
    ForeignError,
    HiddenStatesError,
    MissingError,
    TornError,
    WaitTimeoutError,
    WriterDiedError,
)
from layertap.files import format as fmt
from layertap.files.locks import is_held, lock_path, read_content, read_note, wait_for_writer
from layertap.files.paths import QUARANTINE_SUFFIX, error_path
from layertap.files.values import check_read_dtype, to_tensors

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A file's content, checked: raw rows uint8 [rows, layers, bytes of a slot], token ids int64 [rows]."""

    info: fmt.FileInfo
    rows: NDArray[np.uint8]
    token_ids: NDArray[np.int64]


def load_hidden_states(
    path: str | os.PathLike[str], *, timeout: float = DEFAULT_TIMEOUT_SECONDS, dtype: str | None = None
) -> "dict[str, torch.Tensor]":
    """Load one file, waiting for its writer where it is still being written.

    Args:
        path: what came back as `kv_transfer_params["hidden_states_path"]`.
        timeout: seconds to wait for the writer at most.
        dtype: "float32", "bfloat16" or "float16": convert the rows; None: as they are in the file.

    Returns:
        `hidden_states` [tokens, layers, hidden] in the file's dtype and `token_ids` [tokens] int64, both on the CPU. A file of fp8
        rows that aren't converted gives `hidden_states_scale` [tokens, layers], too: a value stands for itself times its scale.

    Raises:
        HiddenStatesError: the writer failed (its reason), died (WriterDiedError), is too slow (WaitTimeoutError), or the file is
            missing (MissingError), torn (TornError), foreign (ForeignError) or corrupt (CorruptError).
        OptionError: a dtype that rows can't be read as.
    """
    import torch

    check_read_dtype(dtype)
    loaded = read_file(path, timeout=timeout)
    return to_tensors(loaded.rows, loaded.info.dtype, dtype) | {"token_ids": torch.from_numpy(loaded.token_ids)}


def read_file(path: str | os.PathLike[str], *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> Loaded:
    """`load_hidden_states` without torch, with what the file says of itself."""
    with _published(path, timeout) as (fd, name):
        return read_open_file(fd, name)


def verify_file(path: str | os.PathLike[str], *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> fmt.FileInfo:
    """Check a file as `read_file` does, without copying its rows; returns what it says of itself."""
    with _published(path, timeout) as (fd, name):
        header = _read_header(fd, name)
        info, begin = header.info, header.data_offset
        if info.packed is not None:
            return read_open_file(fd, name).info
        end = begin + info.num_rows * info.row_bytes
        token_ids = _read_token_ids(fd, end, info.num_rows, name)
        if info.num_rows:
            mapped = mmap.mmap(fd, end, prot=mmap.PROT_READ)  # goes away with the last array that looks at it
            rows = np.frombuffer(mapped, np.uint8, end - begin, begin).reshape(info.num_rows, info.row_bytes)
            check_rows(header, rows, token_ids, name)
        return info


@contextlib.contextmanager
def _published(path: str | os.PathLike[str], timeout: float) -> Iterator[tuple[int, str]]:
    """The descriptor and the name of a file, once its writer is done."""
    target = Path(path)
    wait_for_writer(target, timeout)
    fd = _open(target)
    try:
        _refuse_outdated(target, fd)
        yield fd, str(target)
    finally:
        os.close(fd)


def read_header(path: str | os.PathLike[str]) -> fmt.Header:
    """Parse and check the header of a published file, without reading its rows.

    Raises:
        HiddenStatesError: see `load_hidden_states`.
    """
    target = Path(path)
    try:
        fd = _open(target)
    except WriterDiedError as exc:
        if is_held(lock_path(target)):
            raise WaitTimeoutError(
                f"{target}: is still being written; load_hidden_states waits for it", request_id=exc.request_id
            ) from None
        fd = _open(target)  # published in this moment, or its writer really died
    try:
        return _read_header(fd, str(target))
    finally:
        os.close(fd)


def check_rows(
    header: fmt.Header, rows: NDArray[np.uint8], token_ids: NDArray[np.int64], name: str, first_row: int = 0
) -> None:
    """Compare rows [n, bytes of a row] and their token ids with the digests of a header.

    Raises:
        CorruptError: names the first row that differs.
    """
    found = fmt.row_digests(rows, token_ids)
    wrong = np.flatnonzero(found != header.row_digests[first_row : first_row + len(found)])
    if wrong.size:
        raise CorruptError(
            f"{name}: {wrong.size} of {len(found)} rows don't match their checksums, first row {first_row + int(wrong[0])} "
            f"(position {header.info.first_position + first_row + int(wrong[0])}): the file was damaged after it was written"
        )


def cleanup_hidden_states(path: str | os.PathLike[str], keep_hidden_states: bool = False) -> None:
    """Remove a file with its lock and error file; with `keep_hidden_states`, only the lock and error file."""
    target = Path(path)
    if not keep_hidden_states:
        target.unlink(missing_ok=True)
    error_path(target).unlink(missing_ok=True)
    lock_path(target).unlink(missing_ok=True)


def _read_header(fd: int, name: str) -> fmt.Header:
    try:
        status = os.fstat(fd)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise ForeignError(f"{name}: a pipe or a device, not a file of hidden states")
        size = status.st_size
        body_bytes = fmt.header_size(os.pread(fd, 8, 0), size, name)
        return fmt.decode_header(os.pread(fd, body_bytes, 8), size, name)
    except IsADirectoryError as exc:
        raise ForeignError(f"{name}: a folder, not a file of hidden states (open_dataset reads data sets)") from exc


def read_open_file(fd: int, name: str) -> Loaded:
    """`read_file` for a file that is open already; `name` is for messages."""
    header = _read_header(fd, name)
    info = header.info
    stored = _read_array(fd, header.data_offset, info.stored_bytes, name)
    token_ids = _read_token_ids(fd, header.data_offset + stored.size, info.num_rows, name)
    rows = (
        stored.reshape(info.num_rows, info.row_bytes)
        if info.packed is None
        else _decompressed(fd, header, info.packed, stored, name)
    )
    check_rows(header, rows, token_ids, name)
    slot_bytes = info.row_bytes // len(info.layers)
    return Loaded(info=info, rows=rows.reshape(info.num_rows, len(info.layers), slot_bytes), token_ids=token_ids)


def _decompressed(
    fd: int, header: fmt.Header, packed: fmt.Packed, stored: NDArray[np.uint8], name: str
) -> NDArray[np.uint8]:
    from layertap.files.blocks import BlockRows  # pyarrow takes a moment

    info = header.info
    table = _read_array(fd, header.data_offset + stored.size + 8 * info.num_rows, packed.table_bytes, name).view("<i8")
    blocks = BlockRows(info, stored, table.reshape(-1, 2), name)
    if blocks.num_rows != info.num_rows:
        raise CorruptError(f"{name}: blocks of {blocks.num_rows} rows, the header says {info.num_rows}")
    return blocks.read(0, info.num_rows)


def _read_token_ids(fd: int, offset: int, num_rows: int, name: str) -> NDArray[np.int64]:
    token_ids = _read_array(fd, offset, 8 * num_rows, name).view("<i8").astype(np.int64, copy=False)
    if (token_ids < 0).any():
        raise CorruptError(f"{name}: negative token ids")
    return token_ids


def _read_array(fd: int, offset: int, num_bytes: int, name: str) -> NDArray[np.uint8]:
    out = np.empty(num_bytes, np.uint8)
    view, done = out.data, 0
    while done < num_bytes:
        got = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
        if got == 0:
            raise TornError(f"{name}: ends {num_bytes - done} bytes early")
        done += got
    return out


def _open(path: Path) -> int:
    if path.name.endswith(QUARANTINE_SUFFIX):
        found = _failure_on_record(path)
        reason = "no reason is on record" if found is None else found.reason
        raise HiddenStatesError(
            f"{path}: in quarantine, its rows are wrong: {reason} (safetensors.torch.load_file opens it all the same)",
            reason=reason,
        )
    try:
        # not blocking: opening a pipe that somebody put there would wait for ever
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _why_missing(path) from None


def _refuse_outdated(path: Path, fd: int) -> None:
    """The file that is there is the old one if the last attempt to replace it failed; its reader asks for the new one."""
    failure = _failure_on_record(path, os.fstat(fd))
    if failure is not None:
        raise failure
    lock = lock_path(path)
    content = read_content(lock)
    if content is not None and content.replaces and not is_held(lock):
        raise WriterDiedError(
            f"{path}: its writer (process {content.holder.get('pid')}) ended before it replaced the file that is there; "
            "cleanup_hidden_states(path, keep_hidden_states=True) makes the old file readable again",
            request_id=content.request_id,
        )


def _failure_on_record(path: Path, there: os.stat_result | None = None) -> HiddenStatesError | None:
    """The reason of the last attempt to publish the file, where it failed; `there` is the file that is there, if one is."""
    twin = error_path(path)
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        record = json.loads(read_note(twin))
        # what came after the failure is no business of it; told by the file and not by clocks, which jump
        if there is None or record.get("stands") == fmt.identity(there):
            reason, request_id = str(record.get("reason")), record.get("request_id")
            return HiddenStatesError(f"{path}: {reason} (request {request_id})", reason=reason, request_id=request_id)
    content = read_content(lock_path(path))
    if content is not None and content.error is not None:
        return HiddenStatesError(
            f"{path}: {content.error} (request {content.request_id})",
            reason=content.error,
            request_id=content.request_id,
        )
    return None


def _why_missing(path: Path) -> HiddenStatesError:
    failure = _failure_on_record(path)
    if failure is not None:
        return failure
    lock = lock_path(path)
    content = read_content(lock)
    if lock.exists():
        pid = content.holder.get("pid") if content else "unknown"
        return WriterDiedError(
            f"{path}: its writer (process {pid}) ended before it was published",
            request_id=content.request_id if content else None,
        )
    return MissingError(f"no such file of hidden states, and nobody is writing it: {path}")
