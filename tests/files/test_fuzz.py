"""Any bytes at all: the reader delivers the file that was written or says one of its errors, and takes no memory beyond it."""

import base64
import contextlib
import json
import os
import struct

import pytest
from file_cases import make_recorder, make_spec, write_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_memory import peak_bytes

from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions
from layertap.errors import HiddenStatesError, OptionError
from layertap.files import format as fmt
from layertap.files.read import read_file, read_header, verify_file

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "a.safetensors"
    rows, ids, _ = write_sample(make_recorder(), path, make_spec())
    return path.read_bytes(), rows.tobytes(), ids.tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "a.safetensors"


def read_or_say(target, content, allowed_bytes=1 << 22):
    """What was delivered, or None after one of our errors; what is allowed is for what Python itself keeps."""
    target.write_bytes(content)
    found = None

    def read():
        nonlocal found
        found = None
        with contextlib.suppress(HiddenStatesError):
            found = read_file(target, timeout=0)

    most = 20 * len(content) + allowed_bytes
    assert peak_bytes(read, most) < most
    verified = None
    with contextlib.suppress(HiddenStatesError):
        verified = verify_file(target, timeout=0)
    assert verified == (None if found is None else found.info), "the two ways of checking a file disagree"
    return found


def with_header(value, tail=b""):
    body = json.dumps(value).encode()
    return struct.pack("<Q", len(body)) + body + tail


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_random_bytes(target, content):
    assert read_or_say(target, content) is None


@given(st.integers(0, 2**64 - 1), st.binary(max_size=64))
@settings(deadline=None)
def test_any_size_of_the_header(target, size, tail):
    assert read_or_say(target, struct.pack("<Q", size) + tail) is None


@given(JSON)
@settings(deadline=None)
def test_any_json_as_the_header(target, value):
    assert read_or_say(target, with_header(value)) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"__metadata__": {"layertap_format": []}}']
)
def test_headers_made_to_break_parsers(target, text):
    body = text.encode()
    assert read_or_say(target, struct.pack("<Q", len(body)) + body, allowed_bytes=64 << 20) is None


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_flipped_cut_moved_and_repeated_bytes_are_never_delivered(good, target, data):
    content, rows, ids = good
    begin = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(begin, min(len(content), begin + 64)))
    change = data.draw(st.sampled_from(["flip", "cut", "repeat", "insert"]))
    if change == "flip":
        mutated = bytearray(content)
        mutated[begin] ^= 1 << data.draw(st.integers(0, 7))
        new = bytes(mutated)
    elif change == "cut":
        new = content[:begin] + content[end:]
    elif change == "repeat":
        new = content[:end] + content[begin:end] + content[end:]
    else:
        new = content[:begin] + data.draw(st.binary(max_size=16)) + content[begin:]
    loaded = read_or_say(target, new)
    if loaded is not None:
        assert (loaded.rows.tobytes(), loaded.token_ids.tolist()) == (rows, ids)


@given(
    st.sampled_from(
        ["shape", "dtype", "data_offsets", "layers", "first_position", "prompt_len", "num_layers", "row_digests"]
    ),
    JSON | st.lists(st.integers(0, 2**63), min_size=3, max_size=3) | st.text("0123456789[], -", max_size=30),
)
@settings(deadline=None, max_examples=150)
def test_any_value_in_any_field_even_with_a_digest_that_matches(good, target, name, value):
    """As an attacker would write it: with a digest over the changed header."""
    content, rows, ids = good
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    place = header["hidden_states"] if name in ("shape", "dtype", "data_offsets") else header["__metadata__"]
    unchanged = place[name] == value
    place[name] = value
    zeroed = {**header, "__metadata__": {**header["__metadata__"], "digest": "0" * 32}}
    try:
        raw = base64.b64decode(header["__metadata__"]["row_digests"])
    except (TypeError, ValueError):
        raw = b""
    header["__metadata__"]["digest"] = fmt._digest(fmt._json_bytes(zeroed), raw)
    body = json.dumps(header, sort_keys=True, separators=(",", ":")).encode().ljust(size, b" ")
    loaded = read_or_say(target, struct.pack("<Q", len(body)) + body + content[8 + size :])
    assert loaded is None or unchanged or loaded.rows.tobytes() == rows


@given(
    st.dictionaries(
        st.sampled_from([*RequestOptions.__dataclass_fields__, "x"]) | st.text(max_size=8), JSON, max_size=5
    )
)
@settings(deadline=None)
def test_request_options_are_taken_or_named(mapping):
    try:
        options = RequestOptions.parse(mapping)
    except OptionError as exc:
        assert "kv_transfer_params" in str(exc)
    else:
        assert set(mapping) <= set(RequestOptions.__dataclass_fields__)
        options.window.candidates(3, 5)


@given(st.dictionaries(st.sampled_from([*StoreOptions.__dataclass_fields__, "x"]), JSON, max_size=5) | JSON)
@settings(deadline=None)
def test_store_options_are_taken_or_named(mapping):
    try:
        StoreOptions.parse(mapping)
    except OptionError as exc:
        assert "kv_connector_extra_config" in str(exc)


def test_a_pipe_in_the_place_of_a_file_does_not_make_its_reader_wait(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(HiddenStatesError):
        read_file(tmp_path / "a.safetensors", timeout=0)
    with pytest.raises(HiddenStatesError):
        read_header(tmp_path / "a.safetensors")
