"""The file format, versions 1 to 3 (docs/format.md is normative): bytes in, bytes out, no I/O.

A file is a safetensors file with two tensors, `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] int64, in this
order, behind a header that is padded with spaces to the size reserved for it when the first row was written. The metadata makes it
self-describing. `row_digests` holds one xxh3-64 per row, over the row's bytes in all layers with the row's token id as the seed;
`digest` is one xxh3-128 over those digests and the canonical header with `digest` zeroed. So windows and shards can be checked by
row, and a flipped bit in a layer id, a token id or a row shows.

Version 2 is version 1 with fp8 rows: its first tensor is `hidden_states_fp8`, uint8 [tokens, layers, hidden + 8]. Version 3 has
the rows of either in compressed blocks (`files.blocks`): `hidden_states_zstd` or `hidden_states_fp8_zstd`, uint8 [bytes], and
`blocks`, which says where each begins. Digests are over the rows as they were. All else is written as
version 1, so that readers that know only that one read on.
"""

import base64
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from layertap.capture.request import FP8, FP8_TAIL_BYTES, slot_bytes
from layertap.errors import CorruptError, ForeignError, OptionError, TornError

FORMAT_VERSION = "1"
FP8_FORMAT_VERSION = "2"
PACKED_FORMAT_VERSION = "3"
COMPRESSION = "planes+zstd"
LAYER_CONVENTION = "id L is the input of block L; num_layers is the last block's output, before the final norm"
ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", FP8: "U8"}
_ZERO_DIGEST = "0" * 32
_DIGEST_KEY = b'"digest":"'
_DIGEST_CHARS_PER_ROW = 10.7  # base64 of 8 bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """The size of rows in compressed blocks."""

    num_bytes: int = 0
    """A multiple of 8; what is left over behind the last block is zero."""
    num_blocks: int = 0

    @classmethod
    def of(cls, table: NDArray[np.int64]) -> "Packed":
        """By the table of blocks."""
        return cls(-(-int(table[-1, 1]) // 8) * 8, len(table) - 1)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        return 16 * (self.num_blocks + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What a file says of itself.

    Attributes:
        layers: layer ids, in the order of the rows' slots.
        num_rows: rows in the file (tokens whose states were owed).
        hidden_size: values per row and layer.
        dtype: dtype of the rows: float32, bfloat16, float16 or fp8_e4m3.
        first_position: absolute position of row 0; rows are consecutive.
        prompt_len: tokens of the prompt.
        num_tokens: tokens of the whole sequence, prompt and output.
        num_layers: blocks of the model.
        model: name or path of the model, as it was given.
        facts: everything else, as strings (revision, engine, engine_version, compute_dtype, quantization, finish_reason,
            replayed_rows, weights_version, request_id, residual, ...).
        packed: the rows are compressed; None: they lie there as they are.
    """

    layers: tuple[int, ...]
    num_rows: int
    hidden_size: int
    dtype: str
    first_position: int
    prompt_len: int
    num_tokens: int
    num_layers: int
    model: str
    facts: Mapping[str, str] = field(default_factory=dict)
    packed: Packed | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return len(self.layers) * slot_bytes(self.dtype, self.hidden_size)

    @property
    def format_version(self) -> str:
        """The lowest version that can hold these rows."""
        if self.packed is not None:
            return PACKED_FORMAT_VERSION
        return FP8_FORMAT_VERSION if self.dtype == FP8 else FORMAT_VERSION

    @property
    def rows_name(self) -> str:
        """The tensor of the rows. Bytes that aren't numbers by themselves don't pass as `hidden_states`."""
        name = "hidden_states_fp8" if self.dtype == FP8 else "hidden_states"
        return name if self.packed is None else f"{name}_zstd"

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rows in the file."""
        return self.num_rows * self.row_bytes if self.packed is None else self.packed.num_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.stored_bytes + 8 * self.num_rows + (0 if self.packed is None else self.packed.table_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A parsed header: the info, where the data starts, and the digests to check it by."""

    info: FileInfo
    data_offset: int
    row_digests: NDArray[np.uint64]
    digest: str


def identity(status: os.stat_result) -> list[int]:
    """What tells a published file from another one under the same name, also after it was copied."""
    return [status.st_size, status.st_mtime_ns]


def row_digests(data: NDArray[np.uint8], token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """xxh3-64 of each row with its token id as the seed.

    Args:
        data: uint8 [rows, bytes of a row], C-contiguous.
        token_ids: int64 [rows].
    """
    row_bytes = data.shape[1]
    view = data.data.cast("B") if data.size else memoryview(b"")
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter(
        (digest(view[i * row_bytes : (i + 1) * row_bytes], seed) for i, seed in enumerate(token_ids.tolist())),
        np.uint64,
        len(token_ids),
    )


def header_reserve(info: FileInfo, max_rows: int) -> int:
    """Bytes to keep free at the start of a file for the header of up to `max_rows` rows, a multiple of ALIGNMENT.

    Raises:
        OptionError: the format's limit on a header would be passed, so that no reader would take the file.
    """
    bare = len(_encode_json(info, b"", _ZERO_DIGEST))
    # shapes, offsets and facts that are known only at the end (finish reason, counts) may still grow
    size = 8 + bare + int(max_rows * _DIGEST_CHARS_PER_ROW) + 1024
    reserve = -(-size // ALIGNMENT) * ALIGNMENT
    if reserve - 8 > MAX_HEADER_BYTES:
        most = int((MAX_HEADER_BYTES - bare - 2 * ALIGNMENT) / _DIGEST_CHARS_PER_ROW)
        raise OptionError(
            f"{max_rows} rows may come and a file holds at most {most}: lower max_tokens, or ask for positions"
        )
    return reserve


def encode_header(info: FileInfo, digests: NDArray[np.uint64], reserve: int) -> bytes:
    """The header, padded with spaces to `reserve` bytes.

    Raises:
        ValueError: the header doesn't fit; a bug of the caller's reserve.
    """
    raw = digests.astype("<u8").tobytes()
    zeroed = _encode_json(info, raw, _ZERO_DIGEST)
    # inside of a string the quotes would be escaped: this is the key, and it is there once
    before, key, after = zeroed.partition(_DIGEST_KEY)
    body = b"".join((before, key, _digest(zeroed, raw).encode(), after[len(_ZERO_DIGEST) :]))
    room = reserve - 8
    if len(body) > room:
        raise ValueError(f"the header takes {len(body)} bytes, {room} were reserved")
    return struct.pack("<Q", room) + body.ljust(room, b" ")


def header_size(first_bytes: bytes, file_size: int, name: str) -> int:
    """Bytes of a header, from the first 8 bytes of a file.

    Raises:
        ForeignError: no header of a safetensors file.
        TornError: the file ends inside the header.
    """
    if len(first_bytes) < 8:
        raise TornError(f"{name}: {file_size} bytes, too short for a file of hidden states")
    (size,) = struct.unpack("<Q", first_bytes[:8])
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise ForeignError(f"{name}: not a safetensors file (its header would take {size} bytes)")
    if 8 + size > file_size:
        raise TornError(f"{name}: the header takes {size} bytes, the file ends after {file_size}")
    return int(size)


def decode_header(body: bytes, file_size: int, name: str) -> Header:
    """Parse and check a header.

    Args:
        body: the header's bytes, without the 8 bytes of its size.
        file_size: bytes of the whole file.
        name: the file's name for messages.

    Raises:
        ForeignError: not a file of this format.
        TornError: the file's length isn't what the header says.
        CorruptError: the header doesn't match its own digest.
    """
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as exc:  # also UnicodeDecodeError
        raise ForeignError(f"{name}: the header isn't JSON ({exc})") from exc
    if not isinstance(parsed, dict):
        raise ForeignError(f"{name}: the header isn't a JSON object")
    metadata = parsed.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("layertap_format"), str):
        hint = ""
        if {"hidden_states", "token_ids"} <= parsed.keys():
            hint = "; it looks like one of vLLM's own connector, which carries no checksum: read it with safetensors"
        raise ForeignError(f"{name}: not a file of layertap (no layertap_format in its metadata){hint}")
    version = metadata["layertap_format"]
    if version not in (FORMAT_VERSION, FP8_FORMAT_VERSION, PACKED_FORMAT_VERSION):
        raise ForeignError(
            f"{name}: format version {version!r}; this layertap reads versions {FORMAT_VERSION}, {FP8_FORMAT_VERSION} and "
            f"{PACKED_FORMAT_VERSION}"
        )
    try:
        header = _decode_fields(parsed, dict(metadata), 8 + len(body))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as exc:
        raise CorruptError(f"{name}: the header is damaged ({type(exc).__name__}: {exc})") from exc
    expected_size = header.data_offset + header.info.data_bytes
    raw = header.row_digests.tobytes()
    if _digest(_encode_json(header.info, raw, _ZERO_DIGEST), raw) != header.digest:
        raise CorruptError(f"{name}: the header doesn't match its digest")
    if file_size != expected_size:
        raise TornError(f"{name}: {file_size} bytes, {expected_size} expected: cut off or overwritten")
    return header


def _decode_fields(parsed: dict[str, Any], metadata: dict[str, str], data_offset: int) -> Header:
    packed = None
    if metadata["layertap_format"] == PACKED_FORMAT_VERSION:
        dtype = metadata.pop("dtype")
        shape = json.loads(metadata.pop("shape"))
        if metadata.pop("compression") != COMPRESSION or dtype not in SAFETENSORS_DTYPES:
            raise ValueError("an unknown compression or dtype")
        name = "hidden_states_fp8_zstd" if dtype == FP8 else "hidden_states_zstd"
        packed = Packed(int(parsed[name]["shape"][0]), int(parsed["blocks"]["shape"][0]) - 1)
    else:
        is_fp8 = metadata["layertap_format"] == FP8_FORMAT_VERSION
        tensor = parsed["hidden_states_fp8" if is_fp8 else "hidden_states"]
        dtype = {short: name for name, short in SAFETENSORS_DTYPES.items()}[tensor["dtype"]]
        shape = tensor["shape"]
    num_rows, num_slots, hidden_size = (int(n) for n in shape)
    hidden_size -= FP8_TAIL_BYTES if dtype == FP8 else 0
    layers = tuple(int(layer) for layer in json.loads(metadata.pop("layers")))
    raw = base64.b64decode(metadata.pop("row_digests"), validate=True)
    digest = metadata.pop("digest")
    known = {key: metadata.pop(key) for key in _KNOWN_KEYS}
    info = FileInfo(
        layers=layers,
        num_rows=num_rows,
        hidden_size=hidden_size,
        dtype=dtype,
        first_position=int(known["first_position"]),
        prompt_len=int(known["prompt_len"]),
        num_tokens=int(known["num_tokens"]),
        num_layers=int(known["num_layers"]),
        model=known["model"],
        facts=metadata,
        packed=packed,
    )
    sizes = [num_rows, hidden_size, *((packed.num_bytes, packed.num_blocks) if packed is not None else ())]
    if len(layers) != num_slots or len(raw) != 8 * num_rows or min(sizes) < 0:
        raise ValueError(
            f"{num_slots} slots and {num_rows} rows, but {len(layers)} layer ids and {len(raw)} digest bytes"
        )
    if _json_bytes(parsed) != _encode_json(info, raw, digest):
        raise ValueError("fields that this format doesn't have")
    return Header(info=info, data_offset=data_offset, row_digests=np.frombuffer(raw, "<u8"), digest=digest)


_KNOWN_KEYS = (
    "layertap_format",
    "layer_convention",
    "final_norm",
    "first_position",
    "prompt_len",
    "num_tokens",
    "num_layers",
    "model",
)


def _encode_json(info: FileInfo, raw_digests: bytes, digest: str) -> bytes:
    width = info.hidden_size + (FP8_TAIL_BYTES if info.dtype == FP8 else 0)
    shape = [info.num_rows, len(info.layers), width]
    packed = info.packed
    metadata = {
        **info.facts,
        "layertap_format": info.format_version,
        "layer_convention": LAYER_CONVENTION,
        "final_norm": "false",
        "layers": json.dumps(list(info.layers)),
        "first_position": str(info.first_position),
        "prompt_len": str(info.prompt_len),
        "num_tokens": str(info.num_tokens),
        "num_layers": str(info.num_layers),
        "model": info.model,
        "row_digests": base64.b64encode(raw_digests).decode(),
        "digest": digest,
    }
    if packed is not None:
        metadata |= {"compression": COMPRESSION, "dtype": info.dtype, "shape": json.dumps(shape)}
    tensors = [
        (info.rows_name, SAFETENSORS_DTYPES[info.dtype], shape, info.stored_bytes)
        if packed is None
        else (info.rows_name, "U8", [packed.num_bytes], packed.num_bytes),
        ("token_ids", "I64", [info.num_rows], 8 * info.num_rows),
    ]
    if packed is not None:
        tensors.append(("blocks", "I64", [packed.num_blocks + 1, 2], packed.table_bytes))
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, dtype, size, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [begin, begin + num_bytes]}
        begin += num_bytes
    return _json_bytes(header)


_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _json_bytes(value: Any) -> bytes:
    return _encoder.encode(value).encode()


def _digest(zeroed_header: bytes, raw_digests: bytes) -> str:
    state = xxhash.xxh3_128()
    state.update(raw_digests)
    state.update(zeroed_header)
    return str(state.hexdigest())
