import numpy as np
import pytest
from dataset_cases import ROW_BYTES, make_manifest, make_sample, write_dataset

from layertap.datasets.lookup import CACHE_NAME, load_lookup, write_cache
from layertap.datasets.manifest import read_manifest
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, ShardOptions
from layertap.errors import CorruptError

SMALL = ShardOptions(shard_bytes=30 * ROW_BYTES, fsync=False)


def write(folder, indices, layout="shards"):
    with locked_folder(folder):
        prepared = prepare_folder(folder, make_manifest(layout))
        with DatasetWriter(folder, prepared.manifest, SMALL) as writer:
            for index in indices:
                mask = None if index % 3 == 0 else tuple((at, at + 1) for at in range(0, index % 3, 2))
                writer.add(make_sample(index, tokens=5 + index % 4, loss_mask=mask))
    return prepared.manifest.id


def assert_same(one, other):
    for name in ("index", "file", "row", "tokens", "prompt_tokens", "part", "line"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype
    assert (one.files, one.parts) == (other.files, other.parts)
    for name in ("loss_mask", "positions"):
        for part in ("offsets", "known", "spans"):
            assert np.array_equal(getattr(getattr(one, name), part), getattr(getattr(other, name), part))


@pytest.mark.parametrize("layout", ["shards", "files"])
def test_the_file_of_the_lookup_says_what_the_parts_say(folder, layout):
    id = write(folder, [5, 3, 9, 1, 0, 2, 30, 4], layout)
    write_cache(folder, id)
    assert_same(load_lookup(folder, id, use_cache=True), load_lookup(folder, id))
    ds = open_dataset(folder)
    for position, index in enumerate(ds.indices.tolist()):
        mask = ds.loss_mask(position)
        assert (mask is None) == (index % 3 == 0)
        assert mask is None or np.flatnonzero(mask).tolist() == list(range(0, index % 3, 2))


def test_a_set_that_grew_or_an_old_or_damaged_file_is_read_from_its_parts(folder):
    id = write(folder, range(6))
    write_cache(folder, id)
    write(folder, range(6, 9))
    assert open_dataset(folder).indices.tolist() == list(range(9))
    write_cache(folder, id)
    path = folder / CACHE_NAME
    whole = path.read_bytes()
    for at in (3, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert open_dataset(folder).indices.tolist() == list(range(9))
    path.write_bytes(whole[:-1])
    assert open_dataset(folder).indices.tolist() == list(range(9))


def test_a_file_of_another_set_is_not_taken(folder, tmp_path):
    write(folder, range(3))
    other = tmp_path / "other"
    write_dataset(other, range(4), options=SMALL)
    write_cache(other, read_manifest(other).id)
    (folder / CACHE_NAME).write_bytes((other / CACHE_NAME).read_bytes())
    assert len(open_dataset(folder)) == 3


def test_an_empty_set_has_an_empty_lookup(folder):
    id = write(folder, [])
    write_cache(folder, id)
    assert len(load_lookup(folder, id, use_cache=True)) == 0


def test_a_mask_that_reaches_past_its_sample_is_an_error(folder):
    with locked_folder(folder):
        prepared = prepare_folder(folder, make_manifest())
        with DatasetWriter(folder, prepared.manifest, SMALL) as writer:
            writer.add(make_sample(0, tokens=4, loss_mask=((2, 5),)))
    with pytest.raises(CorruptError, match="loss mask"):
        open_dataset(folder)[0]
