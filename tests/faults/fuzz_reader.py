"""Fuzz the file reader with atheris, guided by coverage: headers, sizes, offsets, metadata, huge shapes.

Run as: pip install atheris; python tests/faults/fuzz_reader.py CORPUS_FOLDER -max_total_time=300 [-rss_limit_mb=1024]

Besides raw bytes, inputs are real files with changed fields under a digest that matches, so that they get past the checksum of the
header. Anything but rows that fit into the file or one of our errors is a finding; so is memory beyond the limit.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["layertap"]):
    from layertap.errors import HiddenStatesError
    from layertap.files import format as fmt
    from layertap.files.read import read_file

sys.path.insert(0, str(Path(__file__).parents[1] / "files"))

from file_cases import make_recorder, make_spec, write_sample

_FOLDER = Path(tempfile.mkdtemp(prefix="layertap-fuzz-"))
_PATH = _FOLDER / "fuzzed.safetensors"


_NUMBERS = (-1, 0, 1, 2, 3, 8, 48, 2**31, 2**32, 2**53, 2**63 - 1, 2**64, 10**40)
_templates: list[tuple[dict, bytes]] = []


def one(data: bytes) -> None:
    """Read one input, as it is or with some fields of a real header changed."""
    given = atheris.FuzzedDataProvider(data)
    content = given.ConsumeBytes(1 << 13) if given.ConsumeIntInRange(0, 3) == 0 else _changed(given)
    _PATH.write_bytes(content)
    try:
        loaded = read_file(_PATH, timeout=0)
    except HiddenStatesError:
        return
    if loaded.rows.nbytes > len(content):
        raise AssertionError("more rows than the file has bytes")


def _changed(given) -> bytes:
    template, rest = given.PickValueInList(_templates)
    parsed = json.loads(json.dumps(template))
    for _ in range(given.ConsumeIntInRange(1, 4)):
        where = given.PickValueInList(["__metadata__", "hidden_states", "token_ids"])
        place = parsed[where]
        name = given.PickValueInList([*place, "new"]) if given.ConsumeIntInRange(0, 9) else given.ConsumeUnicode(8)
        value = _value(given, _unpacked(place.get(name)), 0)
        # the metadata of a safetensors file are texts, some of them JSON
        place[name] = value if where != "__metadata__" or isinstance(value, str) else json.dumps(value)
    try:  # the digest that decode_header will compute
        header = fmt._decode_fields(parsed, dict(parsed["__metadata__"]), 0)
        raw = header.row_digests.tobytes()
        parsed["__metadata__"]["digest"] = fmt._digest(fmt._encode_json(header.info, raw, "0" * 32), raw)
    except Exception:  # noqa: BLE001 - then the reader has to refuse it as it is
        pass
    body = json.dumps(parsed).encode()
    return struct.pack("<Q", len(body)) + body + rest[: given.ConsumeIntInRange(0, len(rest)) or None]


def _unpacked(value):
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _value(given, old, depth: int):
    kind = given.ConsumeIntInRange(0, 6 if depth < 3 else 3)
    if kind == 0:
        return given.PickValueInList(list(_NUMBERS))
    if kind == 1:
        return str(given.PickValueInList(list(_NUMBERS)))
    if kind == 2:
        return given.ConsumeUnicode(12)
    if kind == 3:
        return given.PickValueInList([None, True, 0.5, "float32", "F32", "I64", "1,2", "[]", ""])
    if kind == 4 and isinstance(old, list) and old:
        new = list(old)
        new[given.ConsumeIntInRange(0, len(new) - 1)] = given.PickValueInList(list(_NUMBERS))
        return new
    return [_value(given, None, depth + 1) for _ in range(given.ConsumeIntInRange(0, 4))]


def seeds(folder: Path) -> None:
    """Put real files of every dtype into the corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = make_recorder()
    for dtype in ("float32", "bfloat16", "float16"):
        path = _FOLDER / f"{dtype}.safetensors"
        write_sample(recorder, path, make_spec(dtype=dtype, num_rows=3))
        whole = path.read_bytes()
        (folder / dtype).write_bytes(whole)
        size = struct.unpack("<Q", whole[:8])[0]
        _templates.append((json.loads(whole[8 : 8 + size]), whole[8 + size :]))
    recorder.close()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    seeds(Path(sys.argv[1]))
    atheris.Setup([*sys.argv, "-max_len=8192"], one)
    atheris.Fuzz()
