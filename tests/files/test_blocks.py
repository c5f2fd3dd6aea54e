"""Rows in compressed blocks: bit for bit what went in, readable from the description alone, and damage is found."""

import itertools
import json
import struct

import numpy as np
import pyarrow as pa
import pytest
import safetensors
import torch
import xxhash
from compressed_cases import write_compressed
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from layertap.capture.request import slot_bytes
from layertap.errors import CorruptError, HiddenStatesError, TornError
from layertap.files import blocks
from layertap.files.format import FileInfo, Packed
from layertap.files.read import load_hidden_states, read_file, read_header, verify_file


def info_of(dtype, num_layers, hidden_size):
    return FileInfo(
        layers=tuple(range(num_layers)),
        num_rows=0,
        hidden_size=hidden_size,
        dtype=dtype,
        first_position=0,
        prompt_len=0,
        num_tokens=0,
        num_layers=num_layers,
        model="tiny",
        packed=Packed(),
    )


@given(
    st.sampled_from(["float32", "bfloat16", "float16", "fp8_e4m3"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_any_rows_of_any_bytes_come_back_bit_for_bit(dtype, num_layers, eights, sizes, data):
    info = info_of(dtype, num_layers, 8 * eights)
    assert info.row_bytes == num_layers * slot_bytes(dtype, 8 * eights)
    kind = data.draw(st.sampled_from(["any", "same", "zero"]))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = draw.integers(0, {"any": 256, "same": 2, "zero": 1}[kind], (sum(sizes), info.row_bytes), np.uint8)
    cuts = np.cumsum([0, *sizes])
    packed = [blocks.compress(rows[begin:end], info) for begin, end in itertools.pairwise(cuts)]
    table = np.stack([cuts, np.cumsum([0, *map(len, packed)])], axis=1)
    read = blocks.BlockRows(info, np.concatenate(packed), table, "x")
    assert read.num_rows == len(rows)
    first = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - first))
    assert np.array_equal(read.read(first, count), rows[first : first + count])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8_e4m3"])
def test_compressed_rows_can_be_read_from_the_description_alone(tmp_path, dtype):
    """An independent reader of version 3, written from docs/format.md."""
    path = tmp_path / "a.safetensors"
    rows, ids = write_compressed(path, dtype, num_rows=11, step=4)
    tensors = load_file(path)
    name = "hidden_states_fp8_zstd" if dtype == "fp8_e4m3" else "hidden_states_zstd"
    assert set(tensors) == {name, "token_ids", "blocks"}
    with safetensors.safe_open(path, "pt") as file:
        facts = file.metadata()
    assert (facts["layertap_format"], facts["compression"], facts["dtype"]) == ("3", "planes+zstd", dtype)
    tokens, layers, width = json.loads(facts["shape"])
    size = {"float32": 4, "fp8_e4m3": 1}.get(dtype, 2)
    found = []
    table = tensors["blocks"].tolist()
    for (row, byte), (next_row, next_byte) in itertools.pairwise(table):
        block = tensors[name][byte:next_byte].numpy().tobytes()
        raw = pa.Codec("zstd").decompress(block, (next_row - row) * layers * width * size, asbytes=True)
        planes = np.frombuffer(raw, np.uint8).reshape(layers, size, next_row - row, width)
        found.append(np.moveaxis(planes, [0, 1, 2, 3], [1, 3, 0, 2]).reshape(next_row - row, -1))
    assert table[-1][0] == tokens == len(ids)
    assert np.concatenate(found).tobytes() == rows.tobytes()
    assert tensors["token_ids"].tolist() == ids.tolist()
    digests = read_header(path).row_digests.tolist()
    assert digests == [xxhash.xxh3_64_intdigest(row.tobytes(), int(i)) for row, i in zip(rows, ids, strict=True)]


def test_the_common_reader_gives_numbers_and_checks_them(tmp_path):
    path = tmp_path / "a.safetensors"
    rows, ids = write_compressed(path, "bfloat16", num_rows=9, step=2)
    loaded = load_hidden_states(path)
    assert loaded["hidden_states"].shape == (9, 2, 8)
    assert loaded["hidden_states"].view(torch.uint8).numpy().tobytes() == rows.tobytes()
    assert loaded["token_ids"].tolist() == ids.tolist()
    assert verify_file(path).num_rows == 9
    assert read_file(path).info.packed.num_blocks == 5


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "a.safetensors"
    write_compressed(path, "bfloat16", num_rows=7, step=3)
    return path.read_bytes()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_caught(sample, tmp_path_factory, data):
    padding = range(8 + len(sample[8 : 8 + struct.unpack("<Q", sample[:8])[0]].rstrip(b" ")), 4096)
    place = data.draw(st.integers(0, len(sample) - 1).filter(lambda i: i not in padding))
    damaged = bytearray(sample)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    path.write_bytes(damaged)
    try:
        loaded = read_file(path)
    except HiddenStatesError:
        return
    # zstd's frames have a few bits that say nothing of the content; then the rows are those that were written
    path.write_bytes(sample)
    assert np.array_equal(loaded.rows, read_file(path).rows)
    assert np.array_equal(loaded.token_ids, read_file(path).token_ids)


@given(st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_any_cut_is_caught(sample, tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "a.safetensors"
    path.write_bytes(sample[:length])
    if length < len(sample):
        with pytest.raises(HiddenStatesError):
            read_file(path)


@pytest.mark.parametrize(
    "table", [[[0, 0], [7, 9]], [[0, 0], [3, 0], [7, 9]], [[1, 0], [7, 9]], [[0, 0], [2000000, 9]]]
)
def test_tables_that_cannot_be_are_refused_before_anything_is_allocated(table):
    stored = np.array([1] * 8, np.uint8)
    with pytest.raises(CorruptError, match="table of blocks"):
        blocks.BlockRows(info_of("float32", 1, 8), stored, np.array(table), "x")


def test_a_truncated_file_is_torn(tmp_path, sample):
    path = tmp_path / "a.safetensors"
    path.write_bytes(sample[:-16])
    with pytest.raises(TornError):
        read_file(path)
