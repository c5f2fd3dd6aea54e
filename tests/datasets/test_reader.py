import ctypes
import gc
import mmap
import os
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_cases import ROW_BYTES, assert_holds, make_manifest, make_sample, write_dataset

from layertap.datasets import reader
from layertap.datasets.index import part_paths
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, ShardOptions
from layertap.errors import CorruptError, ForeignError, MissingError, TornError
from layertap.files.format import COMPRESSION

SMALL = ShardOptions(shard_bytes=30 * ROW_BYTES, fsync=False)


@pytest.fixture
def states(folder):
    write_dataset(folder, [3, 0, 2, 5, 1, 7, 6], failures={5}, options=SMALL)
    return folder


def test_it_is_a_sequence_in_the_order_of_the_input(states):
    ds = open_dataset(states)
    assert len(ds) == 6
    assert [item["index"] for item in ds] == [0, 1, 2, 3, 6, 7]
    assert ds[-1]["index"] == 7
    assert ds[np.int64(4)]["index"] == 6
    assert [item["index"] for item in ds[1:-1:2]] == [1, 3]
    assert [item["index"] for item in ds[::-1][:2]] == [7, 6]
    assert len(ds[100:]) == 0
    for position in (6, -7):
        with pytest.raises(IndexError, match="of a data set of 6"):
            ds[position]
    with pytest.raises(TypeError):
        ds["0"]


def test_it_knows_what_it_holds(states):
    ds = open_dataset(states)
    samples = [make_sample(index) for index in (0, 1, 2, 3, 6, 7)]
    assert ds.lengths.tolist() == [len(sample.token_ids) for sample in samples]
    assert ds.num_tokens == sum(ds.lengths)
    assert (ds.layers, ds.dtype, ds.hidden_size) == ((0, 3), "float32", 6)
    assert [(one.index, one.reason) for one in ds.failures] == [(5, "no 5")]
    assert ds.entry(-1).sample_id == "id-7"
    assert "6 samples" in repr(ds)


def test_items_are_tensors_over_the_mapped_file_without_copies(states):
    ds = open_dataset(states)
    first, second = ds[0]["hidden_states"], ds[0]["hidden_states"]
    assert first.dtype == torch.float32
    assert first.shape == (len(make_sample(0).token_ids), 2, 6)
    assert first.data_ptr() == second.data_ptr()
    assert ds[1]["token_ids"].dtype == torch.int64


def test_half_precision_comes_in_its_own_dtype(folder):
    from dataset_cases import make_manifest

    write_dataset(folder, [0], manifest=make_manifest(save_dtype="bfloat16", hidden_size=12))
    item = open_dataset(folder)[0]
    assert item["hidden_states"].dtype == torch.bfloat16
    expected = torch.from_numpy(make_sample(0).rows.copy()).view(torch.bfloat16)
    assert torch.equal(item["hidden_states"].reshape(expected.shape).view(torch.int16), expected.view(torch.int16))


def test_items_of_more_files_than_descriptors_can_be_held_at_once(folder):
    write_dataset(folder, range(60), layout="files")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        items = list(open_dataset(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(items) == 60


def test_a_mapping_lives_as_long_as_what_was_read_from_it(folder):
    write_dataset(folder, [0])
    rows = open_dataset(folder)[0]["hidden_states"][:, 1]
    gc.collect()
    assert torch.equal(rows, torch.from_numpy(make_sample(0).rows.copy()).view(torch.float32).view(-1, 2, 6)[:, 1])
    (mapped,) = {line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line}
    del rows
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()


def test_it_can_be_pickled_and_the_folder_can_be_moved(states, tmp_path):
    ds = open_dataset(states)
    ds[0]
    copy = pickle.loads(pickle.dumps(ds[2:]))
    assert [item["index"] for item in copy] == [2, 3, 6, 7]
    shutil.move(states, tmp_path / "elsewhere")
    assert_holds(tmp_path / "elsewhere", [0, 1, 2, 3, 6, 7])


def test_a_loader_with_workers_reads_it(states):
    loader = torch.utils.data.DataLoader(open_dataset(states), batch_size=None, num_workers=1)
    assert [item["index"] for item in loader] == [0, 1, 2, 3, 6, 7]


def test_damage_is_an_error_of_the_samples_that_it_touches(states):
    shard = sorted(states.glob("shards/*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ds = open_dataset(states, verify=True)
    touched = [position for position in range(len(ds)) if ds.entry(position).file == f"shards/{shard.name}"]
    for position in range(len(ds)):
        if position == touched[-1]:
            with pytest.raises(CorruptError, match=shard.name):
                ds[position]
        else:
            assert ds[position]["index"] == ds.indices[position]
    with pytest.raises(CorruptError, match="don't match the checksum of the index"):
        open_dataset(states).verify()


def test_a_cut_or_missing_shard_is_a_clear_error_and_the_others_can_be_read(states):
    shard = states / open_dataset(states).entry(0).file
    content = shard.read_bytes()
    shard.write_bytes(content[:-9])
    with pytest.raises(TornError, match="no whole number of rows"):
        open_dataset(states)[0]
    shard.unlink()
    with pytest.raises(MissingError, match="the index names this file"):
        open_dataset(states)[0]
    assert open_dataset(states)[-1]["index"] == 7


def test_a_damaged_index_is_an_error_not_a_shorter_set(states):
    part = part_paths(states)[0]
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="the index can't be read"):
        open_dataset(states)


def test_parts_of_another_set_are_refused(states, tmp_path):
    other = tmp_path / "other"
    write_dataset(other, range(2))
    for path in other.glob("shards/*"):
        shutil.copy(path, states / "shards" / path.name.replace("w0-000000", "w0-000009"))
    with pytest.raises(ForeignError, match="another data set"):
        open_dataset(states)


def test_an_empty_set_is_empty(folder):
    write_dataset(folder, [])
    assert list(open_dataset(folder)) == []
    with pytest.raises(IndexError):
        open_dataset(folder)[0]


def test_what_was_read_of_the_index_does_not_travel_to_workers(states):
    ds = open_dataset(states, verify=True)
    list(ds)
    assert [ds.entry(position).sample_id for position in range(2)] == ["id-0", "id-1"]
    assert ds.failures
    sent = pickle.dumps(ds)
    assert all(text.encode() not in sent for text in ("id-1", "no 5", str(ds.entry(0).checksum)))
    assert pickle.loads(pickle.dumps(ds))[0]["index"] == 0


def resident(path):
    """How many bytes of a file the page cache holds."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    return int((pages & 1).sum()) * mmap.PAGESIZE


@pytest.mark.parametrize("compress", [None, COMPRESSION])
def test_of_a_set_larger_than_memory_a_disk_reads_the_samples_and_nothing_around_them(folder, monkeypatch, compress):
    manifest = make_manifest(hidden_size=16_384, options={"compress": compress})
    row_bytes = 2 * 16_384 * 4
    with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, manifest).manifest) as writer:
        for index in range(200):
            writer.add(make_sample(index, tokens=2, row_bytes=row_bytes))
    (shard,) = folder.glob("shards/*.safetensors")

    def read(positions):
        """Cold; returns how many bytes of the shard are in the page cache afterwards."""
        ds = open_dataset(folder, verify=True)[:]
        gc.collect()  # what is mapped stays in the cache
        with shard.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident(shard) > shard.stat().st_size // 10:
            pytest.skip("this file system keeps what it is told to drop")
        ds.will_need(positions)
        for position in positions:
            assert ds.raw(position)[0].tobytes() == make_sample(position, tokens=2, row_bytes=row_bytes).rows.tobytes()
        return resident(shard)

    monkeypatch.setattr(reader, "memory_bytes", lambda: 1 << 20)
    few = read([3, 150, 77, 10])
    # the token ids lie elsewhere, and around those of the first sample it reads what it likes
    assert few < shard.stat().st_size // 4
    monkeypatch.undo()
    assert few <= read([3, 150, 77, 10])
