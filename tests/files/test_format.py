"""The bytes of format version 1: against the safetensors library as an independent reader, frozen files, and damage."""

import base64
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from file_cases import make_recorder, make_spec, write_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.capture.request import Window
from layertap.engines.fp8 import put, storage
from layertap.errors import CorruptError, ForeignError, HiddenStatesError, OptionError, TornError
from layertap.files.read import load_hidden_states, read_header
from layertap.files.values import to_tensors

COMPAT = Path(__file__).parents[1] / "compat"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_safetensors_library_reads_what_was_written(tmp_path, dtype):
    path = tmp_path / "a.safetensors"
    rows, ids, _ = write_sample(make_recorder(), path, make_spec(dtype=dtype), chunk=4)
    tensors = safetensors.torch.load_file(path)
    assert list(tensors) == ["hidden_states", "token_ids"] or set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["hidden_states"].shape == (6, 2, 8)
    assert tensors["hidden_states"].dtype == getattr(torch, dtype)
    assert tensors["token_ids"].tolist() == ids.tolist()
    assert tensors["hidden_states"].view(torch.uint8).numpy().tobytes() == rows.tobytes()
    ours = load_hidden_states(path)
    assert torch.equal(ours["hidden_states"], tensors["hidden_states"])
    assert torch.equal(ours["token_ids"], tensors["token_ids"])


def test_fp8_rows_can_be_read_from_the_description_alone(tmp_path):
    """An independent reader of version 2, written from docs/format.md."""
    path = tmp_path / "a.safetensors"
    rows, ids, _ = write_sample(make_recorder(), path, make_spec(dtype="fp8_e4m3", hidden_size=16), chunk=4)
    tensors = safetensors.torch.load_file(path)
    assert set(tensors) == {"hidden_states_fp8", "token_ids"}
    slots = tensors["hidden_states_fp8"]
    assert (slots.shape, slots.dtype) == ((6, 2, 16 + 8), torch.uint8)
    values, scale = slots[..., :16].view(torch.float8_e4m3fn), slots[..., 16:20].view(torch.float32)
    assert not slots[..., 20:].any()
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["layertap_format"] == "2"
        digests = np.frombuffer(base64.b64decode(file.metadata()["row_digests"]), "<u8")
    bodies = [slots[i].numpy().tobytes() for i in range(6)]
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(b, seed=i) for b, i in zip(bodies, ids.tolist(), strict=True)]
    ours = load_hidden_states(path)
    assert set(ours) == {"hidden_states", "hidden_states_scale", "token_ids"}
    assert torch.equal(ours["hidden_states"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(ours["hidden_states_scale"], scale[..., 0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        read = load_hidden_states(path, dtype=str(dtype).removeprefix("torch."))
        assert set(read) == {"hidden_states", "token_ids"}
        assert torch.equal(read["hidden_states"], (values.float() * scale).to(dtype))


def test_rows_can_be_read_in_another_dtype(tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec(dtype="bfloat16"))
    saved = load_hidden_states(path)["hidden_states"]
    assert torch.equal(load_hidden_states(path, dtype="float32")["hidden_states"], saved.float())
    with pytest.raises(OptionError, match="'fp8_e4m3' is none of float32, bfloat16, float16"):
        load_hidden_states(path, dtype="fp8_e4m3")


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "fp8_e4m3"])
def test_rows_that_a_dtype_cannot_hold_are_not_read_as_infinite(saved):
    slots = torch.empty(1, storage(saved, 16)[1], dtype=storage(saved, 16)[0])
    put(slots, torch.tensor([[1.0] * 15 + [-7e4]]))
    raw = slots.view(torch.uint8)[:, None].numpy()
    assert float(to_tensors(raw, saved, "float32")["hidden_states"].min()) == pytest.approx(-7e4, rel=0.01)
    with pytest.raises(OptionError, match="float16 ends at 65504, .* up to (70000|70144).* or bfloat16"):
        to_tensors(raw, saved, "float16")


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
def test_a_header_of_the_other_version_is_damage(tmp_path, dtype):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec(dtype=dtype))
    version, other = (b'"layertap_format":"1"', b'"layertap_format":"2"')[:: -1 if dtype == "fp8_e4m3" else 1]
    content = path.read_bytes()
    assert content.count(version) == 1
    check_refused(tmp_path, content.replace(version, other), (CorruptError,))


def test_the_metadata_says_what_the_file_holds(tmp_path):
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec(), facts={"weights_version": "17"})
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["layertap_format"] == "1"
    assert json.loads(metadata["layers"]) == [3, 1]
    assert metadata["final_norm"] == "false"
    assert metadata["finish_reason"] == "prefill"
    assert (metadata["model"], metadata["num_layers"], metadata["prompt_len"], metadata["first_position"]) == (
        "tiny",
        "4",
        "6",
        "0",
    )
    assert (metadata["engine"], metadata["compute_dtype"], metadata["weights_version"]) == ("test", "float32", "17")
    assert metadata["replayed_rows"] == "0"


def test_digests_can_be_recomputed_from_the_description_alone(tmp_path):
    """An independent reader, written from docs/format.md."""
    path = tmp_path / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    assert (8 + size) % 4096 == 0
    header = json.loads(raw[8 : 8 + size])
    data, ids_bytes = raw[8 + size :][: 6 * 64], raw[8 + size + 6 * 64 :]
    ids = struct.unpack("<6q", ids_bytes)
    digests = [xxhash.xxh3_64_intdigest(data[i * 64 : (i + 1) * 64], seed=ids[i]) for i in range(6)]
    packed = struct.pack("<6Q", *digests)
    assert base64.b64decode(header["__metadata__"]["row_digests"]) == packed
    digest = header["__metadata__"]["digest"]
    header["__metadata__"]["digest"] = "0" * 32
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert xxhash.xxh3_128_hexdigest(packed + canonical) == digest


@pytest.mark.parametrize("name", ["format_1/float32", "format_1/bfloat16_window", "format_2/fp8", "format_3/bfloat16"])
def test_files_of_older_versions_stay_readable_byte_for_byte(name, tmp_path):
    expected = json.loads((COMPAT / f"{name}.json").read_text())
    path = tmp_path / "frozen.safetensors"
    path.write_bytes(base64.b64decode(expected["file"]))
    loaded = load_hidden_states(path, dtype="float32")
    assert loaded["token_ids"].tolist() == expected["token_ids"]
    np.testing.assert_array_equal(
        loaded["hidden_states"].float().numpy(), np.array(expected["hidden_states"], np.float32)
    )
    header = read_header(path)
    assert (list(header.info.layers), header.digest) == (expected["layers"], expected["digest"])
    assert header.info.first_position == expected["first_position"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "a.safetensors"
    write_sample(make_recorder(), path, make_spec())
    return path.read_bytes()


def check_refused(folder, content, kinds=(HiddenStatesError,)):
    path = folder / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(kinds) as caught:
        load_hidden_states(path)
    assert "damaged.safetensors" in str(caught.value)
    return caught.value


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_caught(sample, tmp_path_factory, data):
    """In rows, ids, layer ids, digests, facts: anywhere but the padding, which says nothing."""
    padding = range(8 + len(sample[8 : 8 + struct.unpack("<Q", sample[:8])[0]].rstrip(b" ")), 4096)
    place = data.draw(st.integers(0, len(sample) - 1).filter(lambda i: i not in padding))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(sample)
    damaged[place] ^= 1 << bit
    check_refused(tmp_path_factory.mktemp("flip"), bytes(damaged))


@given(st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_any_cut_is_caught(sample, tmp_path_factory, length):
    if length < len(sample):
        check_refused(tmp_path_factory.mktemp("cut"), sample[:length], (TornError, ForeignError))


def test_anything_behind_the_end_is_caught(sample, tmp_path):
    check_refused(tmp_path, sample + b"\0", (TornError,))


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_a_clear_error(tmp_path_factory, content):
    check_refused(tmp_path_factory.mktemp("junk"), content, (TornError, ForeignError))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["hidden_states"].update(shape=[1 << 40, 2, 8]),
        lambda header: header["hidden_states"].update(shape=[-6, 2, 8]),
        lambda header: header["hidden_states"].update(shape=[6, 2]),
        lambda header: header["hidden_states"].update(dtype="I64"),
        lambda header: header["hidden_states"].update(data_offsets=[0, 1 << 60]),
        lambda header: header.update(hidden_states=None),
        lambda header: header.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda header: header["__metadata__"].update(layers="[1]"),
        lambda header: header["__metadata__"].update(layers="1,2"),
        lambda header: header["__metadata__"].update(row_digests="AAAA"),
        lambda header: header["__metadata__"].update(prompt_len="x"),
        lambda header: header["__metadata__"].pop("model"),
        lambda header: header["__metadata__"].pop("digest"),
        lambda header: header["__metadata__"].update(model="another"),
    ],
)
def test_hostile_headers_are_refused_without_allocating(sample, tmp_path, change):
    (size,) = struct.unpack("<Q", sample[:8])
    header = json.loads(sample[8 : 8 + size])
    change(header)
    body = json.dumps(header, sort_keys=True, separators=(",", ":")).encode().ljust(size)
    check_refused(tmp_path, struct.pack("<Q", size) + body + sample[8 + size :], (CorruptError,))


def test_another_version_is_named(sample, tmp_path):
    (size,) = struct.unpack("<Q", sample[:8])
    header = json.loads(sample[8 : 8 + size])
    header["__metadata__"]["layertap_format"] = "4"
    content = struct.pack("<Q", size) + json.dumps(header).encode().ljust(size) + sample[8 + size :]
    assert "version '4'" in str(check_refused(tmp_path, content, (ForeignError,)))


def test_a_file_of_vllms_own_connector_is_named_as_such(tmp_path):
    path = tmp_path / "damaged.safetensors"
    safetensors.torch.save_file(
        {"hidden_states": torch.zeros(2, 1, 4), "token_ids": torch.zeros(2, dtype=torch.int64)}, path
    )
    assert "vLLM's own connector" in str(check_refused(tmp_path, path.read_bytes(), (ForeignError,)))


def test_a_folder_is_a_clear_error(tmp_path):
    with pytest.raises(ForeignError, match="a folder"):
        load_hidden_states(tmp_path)


def test_more_rows_than_a_header_can_list_are_refused_before_anything_is_written(tmp_path):
    spec = make_spec(num_rows=5, max_tokens=12_000_000, window=Window(include_output=True), hidden_size=1)
    with pytest.raises(OptionError, match="12000004 rows may come and a file holds at most"):
        make_recorder().admit(spec, request_id="r", path=tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
