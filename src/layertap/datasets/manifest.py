"""`manifest.json`: everything that the rows of a data set depend on.

Written once, before the first row, and never changed: a run that would make other rows must not add to the set. What
differs is said item by item. The set's random `id` stands in every shard and index part, so that files of different
sets can't be mixed by copying.
"""

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xxhash

from layertap.capture.request import FP8
from layertap.errors import CorruptError, ForeignError, MissingError, OptionError

MANIFEST_NAME = "manifest.json"
FORMAT = "layertap.dataset"
FORMAT_VERSION = 1
FP8_FORMAT_VERSION = 2
PACKED_FORMAT_VERSION = 3
_KNOWN = (FORMAT_VERSION, FP8_FORMAT_VERSION, PACKED_FORMAT_VERSION)

Layout: TypeAlias = Literal["shards", "files"]
LAYOUTS: tuple[Layout, ...] = ("shards", "files")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIdentity:
    """What decides every bit of the rows. Two runs that differ in any of it don't belong in one set."""

    model: str
    """As it was given: hub id or the name of a local path."""
    revision: str | None
    model_fingerprint: str | None
    """xxh3-128 over configuration and weight files (names, sizes, heads and tails), where they are local."""
    tokenizer_hash: str | None
    """xxh3-128 of the tokenizer; None where the input is token ids."""
    chat_template_hash: str | None
    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    save_dtype: str
    compute_dtype: str
    quantization: str | None
    residual: str
    """What the stream is, in the engine's words."""
    engine: str
    engine_version: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of input and run that change prompts or rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The head of a data set."""

    rows: RowIdentity
    layout: Layout
    input_name: str
    """The input file's name, without its folder: the set may be moved to another machine."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """For people: versions, device, time. Not compared."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def format_version(self) -> int:
        """The lowest that says all: readers that know only that one read on."""
        if self.rows.options.get("compress"):
            return PACKED_FORMAT_VERSION
        return FP8_FORMAT_VERSION if self.rows.save_dtype == FP8 else FORMAT_VERSION

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        body = {"format": FORMAT, "format_version": self.format_version, **asdict(self)}
        body["checksum"] = _checksum(body)
        return (json.dumps(body, indent=2, ensure_ascii=True) + "\n").encode()

    def refuse_unless_same(self, other: "Manifest", folder: Path) -> None:
        """Refuse to add rows of `other` (this run) to the set in `folder` (this manifest).

        Raises:
            OptionError: they differ; the message lists in what.
        """
        differences = list(self.differences(other))
        if differences:
            listed = "\n".join(f"  {line}" for line in differences)
            raise OptionError(
                f"{folder} was made from something else; its rows and those of this run must not be mixed:\n{listed}\n"
                "Run again as the set was made, or write to another folder."
            )

    def differences(self, other: "Manifest") -> Iterator[str]:
        """Say item by item in what this manifest and another differ."""
        mine, others = _flat(self._compared()), _flat(other._compared())
        for key in sorted({*mine, *others}):
            here, there = mine.get(key), others.get(key)
            if here != there:
                yield f"{key}: the data set has {_shown(here)}, this run {_shown(there)}"

    def _compared(self) -> dict[str, Any]:
        rows: dict[str, Any] = json.loads(json.dumps(asdict(self.rows)))
        if self.rows.model_fingerprint is not None:
            # a model that was moved is still the same
            rows["model"] = Path(self.rows.model).name
        return {**rows, "layout": self.layout, "input": self.input_name}


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a data set.

    Raises:
        MissingError: the folder, or a manifest in it, isn't there.
        ForeignError: the file is no manifest, or of a format that this version doesn't know.
        CorruptError: the file is damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        what = "has no manifest.json, so it is no data set" if folder.is_dir() else "doesn't exist"
        raise MissingError(f"{folder}: the folder {what}") from None
    except NotADirectoryError:
        raise ForeignError(f"{folder}: expected the folder of a data set, found a file") from None
    try:
        body = json.loads(content)
    except ValueError as exc:
        raise CorruptError(f"{path}: the manifest isn't JSON: {exc}") from exc
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ForeignError(f"{path}: not the manifest of a layertap data set")
    if body.get("format_version") not in _KNOWN:
        raise ForeignError(
            f"{path}: format version {body.get('format_version')!r}; this version of layertap reads "
            f"{', '.join(map(str, _KNOWN[:-1]))} and {_KNOWN[-1]}"
        )
    if body.pop("checksum", None) != _checksum(body):
        raise CorruptError(f"{path}: the manifest doesn't match its checksum")
    try:
        rows = RowIdentity(**{**body["rows"], "layers": tuple(body["rows"]["layers"])})
        return Manifest(
            rows=rows, layout=body["layout"], input_name=body["input_name"], made_by=body["made_by"], id=body["id"]
        )
    except (KeyError, TypeError) as exc:
        raise CorruptError(f"{path}: the manifest lacks an entry or has one too many: {exc}") from exc


def _checksum(body: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
