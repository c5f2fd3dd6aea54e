"""The prompts of a file, one after the other, never the whole file in memory.

    .jsonl, .ndjson     one JSON object a line: `prompt`, `prompt_token_ids`, `messages` or `conversations`
    .json               the same, or one array of such objects (how ShareGPT sets come)
    .parquet            the same names as columns
    .txt, .md, others   one prompt a non-empty line; or a paragraph, or the whole file (`text_unit`)

A record that can't be read doesn't end the file: it comes as a `BrokenRecord` that says what is wrong and where, keeps
its place in the count, and the records behind it follow. Blank lines are no records.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import xxhash

from layertap.datasets.conversations import FIELDS, Field, Prompt, check_text, parse_row, source_hash, without_nulls
from layertap.datasets.json_array import ArrayBrokenError, JsonArray
from layertap.errors import OptionError, PromptError

InputFormat: TypeAlias = Literal["jsonl", "json", "parquet", "text"]
TextUnit: TypeAlias = Literal["line", "paragraph", "file"]

_SUFFIXES: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
# No prompt is as long as this; a file without line ends mustn't fill the memory.
MAX_RECORD_BYTES = 256 << 20
_PARQUET_BATCH_ROWS = 64
_NESTED = {"messages", "conversations", "tools"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """One prompt of an input file."""

    index: int
    """Its place in the input, from 0; broken records count."""
    where: str
    """File and line (or row), for messages."""
    prompt: Prompt
    source_hash: str
    """xxh3-128 over the prompt's content, by which a resumed run knows it again."""
    sample_id: str | None = None
    """The row's own `id`, where it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRecord:
    """A record that holds no prompt that can be run."""

    index: int
    where: str
    error: PromptError
    source_hash: str
    sample_id: str | None = None
    """The row's own `id`, where that much could be read."""


Record: TypeAlias = InputRecord | BrokenRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file and how to read it. Iterating starts at the beginning each time."""

    path: Path
    format: InputFormat
    field: Field | None = None
    """Which field holds the prompt, where a row has several."""
    text_unit: TextUnit = "line"
    """What one prompt of a text file is."""
    limit: int | None = None
    """Stop after so many records (of the file, whatever the share)."""
    share: tuple[int, int] = (0, 1)
    """(i, n): only the records whose index leaves i when divided by n. The shares of all i are the whole, and nothing twice."""

    def __iter__(self) -> Iterator[Record]:
        reader = {"jsonl": _read_jsonl, "json": _read_json, "parquet": _read_parquet, "text": _read_text}[self.format]
        rest, number = self.share
        return (record for record in islice(reader(self), self.limit) if record.index % number == rest)


def open_input(
    path: str | Path,
    *,
    format: str | None = None,
    field: str | None = None,
    text_unit: str = "line",
    limit: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> InputFile:
    """Say how to read an input file; reads none of it.

    Args:
        path: the file.
        format: `jsonl`, `json`, `parquet` or `text`; by the file's suffix if None (anything unknown is text).
        field: the field to read, where a row has several.
        text_unit: `line`, `paragraph` or `file`: what one prompt of a text file is.
        limit: stop after so many records.
        share: (i, n): only every n-th record, from record i on; for several machines.

    Raises:
        OptionError: an option has a value that doesn't exist.
        PromptError: there is no such file.
    """
    path = Path(os.path.expanduser(path))
    if format is not None and format not in get_args(InputFormat):
        raise OptionError(f"format: {format!r} is none of {', '.join(get_args(InputFormat))}")
    if field is not None and field not in FIELDS:
        raise OptionError(f"field: {field!r} is none of {', '.join(FIELDS)}")
    if text_unit not in get_args(TextUnit):
        raise OptionError(f"text_unit: {text_unit!r} is none of {', '.join(get_args(TextUnit))}")
    if limit is not None and limit < 1:
        raise OptionError(f"limit: expected at least 1, got {limit}")
    if not 0 <= share[0] < share[1]:
        raise OptionError(f"shard: expected i/n with i from 0 to n - 1, got {share[0]}/{share[1]}")
    if not path.exists():
        raise PromptError(f"{path}: there is no such input file")
    if not path.is_file():
        raise PromptError(f"{path}: expected a file of prompts (JSONL, Parquet or text), found a folder or device")
    if format is None and path.suffix.lower() in _PACKED:
        raise PromptError(f"{path}: is compressed, and would be read as text; decompress it first")
    chosen: InputFormat = format or _SUFFIXES.get(path.suffix.lower(), "text")  # type: ignore[assignment]
    return InputFile(path=path, format=chosen, field=field, text_unit=text_unit, limit=limit, share=share)  # type: ignore[arg-type]


def _record(source: InputFile, index: int, where: str, row: object) -> Record:
    found = row.get("id") if isinstance(row, dict) else None
    sample_id = str(found) if isinstance(found, str | int) and not isinstance(found, bool) else None
    try:
        prompt = parse_row(row, source.field)
        digest = source_hash(prompt)
    except PromptError as exc:
        return _broken(index, where, f"{where}: {exc}", repr(row).encode("utf-8", "backslashreplace"), sample_id)
    except (TypeError, ValueError, RecursionError) as exc:
        # a Parquet column of times or bytes inside of a message, nesting without end
        return _broken(index, where, f"{where}: can't be read as JSON would be: {exc}", where.encode(), sample_id)
    return InputRecord(index=index, where=where, prompt=prompt, source_hash=digest, sample_id=sample_id)


def _broken(index: int, where: str, message: str, content: bytes, sample_id: str | None = None) -> BrokenRecord:
    digest = xxhash.xxh3_128_hexdigest(content)
    return BrokenRecord(index=index, where=where, error=PromptError(message), source_hash=digest, sample_id=sample_id)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their number, without line ends or mark; one that is too long comes cut just past the limit."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, line
            continue
        line = line.removeprefix(_BOM) if number == 1 else line
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _decode(where: str, line: bytes) -> str:
    if len(line) > MAX_RECORD_BYTES:
        raise PromptError(f"{where}: the line is longer than {MAX_RECORD_BYTES >> 20} MiB")
    try:
        return line.decode()
    except UnicodeDecodeError as exc:
        raise PromptError(
            f"{where} column {exc.start + 1} (in bytes): not UTF-8: {exc.reason} 0x{line[exc.start]:02x}"
        ) from None


def _read_jsonl(source: InputFile) -> Iterator[Record]:
    index = 0
    with source.path.open("rb") as file:
        for number, line in _lines(file):
            if not line.strip():
                continue
            where = f"{source.path} line {number}"
            try:
                row = _parse_json(where, _decode(where, line))
            except PromptError as exc:
                yield _broken(index, where, str(exc), line)
            else:
                yield _record(source, index, where, row)
            index += 1


def _parse_json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        near = text[max(0, exc.pos - 20) : exc.pos + 20]
        raise PromptError(f"{where} column {exc.colno}: broken JSON: {exc.msg} (near {near!r})") from None
    except RecursionError:
        raise PromptError(f"{where}: broken JSON: nested too deeply") from None
    except ValueError as exc:
        raise PromptError(f"{where}: broken JSON: {exc}") from None


def _read_json(source: InputFile) -> Iterator[Record]:
    with source.path.open("rb") as file:
        head = file.read(4096).removeprefix(_BOM).lstrip()
        if not head.startswith(b"["):
            yield from _read_jsonl(source)
            return
        file.seek(0)
        index = 0
        try:
            for line, row in JsonArray(file, max_element_bytes=MAX_RECORD_BYTES):
                yield _record(source, index, f"{source.path} line {line}", row)
                index += 1
        except ArrayBrokenError as exc:
            where = f"{source.path} line {exc.line}"
            message = f"{where} column {exc.column}: broken JSON: {exc}; nothing behind this place could be read"
            yield _broken(index, where, message, message.encode("utf-8", "backslashreplace"))


def _read_parquet(source: InputFile) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row_number = 0
    try:
        with source.path.open("rb") as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
            names = [name for name in file.schema_arrow.names if name in (*FIELDS, "tools", "system", "id")]
            if not set(names) & set(FIELDS):
                columns = ", ".join(file.schema_arrow.names)
                raise PromptError(f"{source.path}: no column is one of {', '.join(FIELDS)} (columns: {columns})")
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=names):
                for row in batch.to_pylist():
                    row |= {name: without_nulls(row[name]) for name in _NESTED & row.keys()}
                    yield _record(source, row_number, f"{source.path} row {row_number}", row)
                    row_number += 1
    except (pa.ArrowException, OSError) as exc:
        raise PromptError(f"{source.path}: can't be read as Parquet at row {row_number}: {exc}") from exc


def _read_text(source: InputFile) -> Iterator[Record]:
    index = 0
    with source.path.open("rb") as file:
        for number, block in _text_blocks(source, file):
            where = f"{source.path} line {number}"
            try:
                text = check_text(where, _decode(where, block))
            except PromptError as exc:
                yield _broken(index, where, str(exc), block)
            else:
                yield _record(source, index, where, {"prompt": text})
            index += 1


def _text_blocks(source: InputFile, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    if source.text_unit == "file":
        content = file.read(len(_BOM) + MAX_RECORD_BYTES + 1).removeprefix(_BOM)
        if content.strip():
            yield 1, content
        return
    paragraph: list[bytes] = []
    start = 0
    size = 0
    for number, line in _lines(file):
        if source.text_unit == "line":
            if line.strip():
                yield number, line
            continue
        if line.strip():
            start = start if paragraph else number
            size += len(line)
            if size <= 2 * MAX_RECORD_BYTES:  # past the limit it will be refused; it needn't be held
                paragraph.append(line)
        elif paragraph:
            yield start, b"\n".join(paragraph)
            paragraph, size = [], 0
    if paragraph:
        yield start, b"\n".join(paragraph)
