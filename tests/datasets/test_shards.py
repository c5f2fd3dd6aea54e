import numpy as np
import pytest
from dataset_cases import ROW_BYTES, make_manifest, make_sample
from safetensors import safe_open

from layertap.datasets.shards import MappedShard, ShardWriter
from layertap.datasets.writer import file_info
from layertap.errors import CorruptError, ForeignError, MissingError, TornError
from layertap.files.read import load_hidden_states, read_file


@pytest.fixture
def shard(tmp_path):
    """A published shard of five samples, and these."""
    path = tmp_path / "a.safetensors"
    samples = [make_sample(index) for index in range(5)]
    writer = ShardWriter(path, file_info(make_manifest()), max_rows=200, fsync=True)
    placed = [writer.append(sample.rows, sample.token_ids) for sample in samples]
    assert not path.exists()
    writer.publish()
    writer.discard()
    return path, samples, placed


def test_a_shard_is_a_safetensors_file_of_all_rows_end_to_end(shard):
    path, samples, placed = shard
    with safe_open(path, "np") as file:
        rows, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
        metadata = file.metadata()
    assert rows.tobytes() == b"".join(sample.rows.tobytes() for sample in samples)
    assert ids.tolist() == np.concatenate([sample.token_ids for sample in samples]).tolist()
    assert rows.shape == (len(ids), 2, 6)
    assert (metadata["samples"], metadata["layers"]) == ("5", "[0, 3]")
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    assert [one.row for one in placed] == starts[:-1].tolist()
    assert [path.name for path in path.parent.iterdir()] == ["a.safetensors"]


def test_a_shard_is_a_layertap_file_that_the_common_reader_checks(shard):
    path, samples, _ = shard
    assert len(load_hidden_states(path)["token_ids"]) == sum(len(sample.token_ids) for sample in samples)
    assert read_file(path).info.facts["samples"] == "5"


def test_mapped_samples_are_views_and_writing_to_one_leaves_the_file_alone(shard):
    path, samples, placed = shard
    before = path.read_bytes()
    mapped = MappedShard(path, file_info(make_manifest()), 1)
    for sample, one in zip(samples, placed, strict=True):
        rows = mapped.rows(one.row, one.num_rows)
        assert not rows.flags.owndata
        assert np.array_equal(rows, sample.rows)
        assert np.array_equal(mapped.token_ids(one.row, one.num_rows), sample.token_ids)
        mapped.read(((one.row, one.row + one.num_rows),), one.checksum)
    mapped.rows(0, 1)[:] = 0
    assert path.read_bytes() == before


def test_a_sample_taken_back_leaves_a_complete_shard(tmp_path):
    path = tmp_path / "a.safetensors"
    writer = ShardWriter(path, file_info(make_manifest()), max_rows=200, fsync=False)
    first, second, third = (make_sample(index) for index in range(3))
    writer.append(first.rows, first.token_ids)
    writer.append(second.rows, second.token_ids)
    writer.drop_last()
    placed = writer.append(third.rows, third.token_ids)
    writer.publish()
    assert placed.row == len(first.token_ids)
    assert load_hidden_states(path)["token_ids"].tolist() == [*first.token_ids, *third.token_ids]


def test_a_discarded_shard_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path / "a.safetensors", file_info(make_manifest()), max_rows=200, fsync=False)
    writer.append(make_sample(0).rows, make_sample(0).token_ids)
    writer.discard()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_rows_that_dont_fit_are_a_bug_that_is_said(tmp_path):
    writer = ShardWriter(tmp_path / "a.safetensors", file_info(make_manifest()), max_rows=3, fsync=False)
    with pytest.raises(ValueError, match="0 \\+ 4 rows in a shard of at most 3"):
        writer.append(make_sample(0, tokens=4).rows, make_sample(0, tokens=4).token_ids)
    with pytest.raises(ValueError, match="rows of shape"):
        writer.append(make_sample(0, tokens=2).rows, make_sample(0, tokens=3).token_ids)
    writer.discard()


def test_every_flipped_bit_of_rows_and_ids_is_found_by_the_sample_that_owns_it(shard):
    path, samples, placed = shard
    content = path.read_bytes()
    offset = len(content) - sum(len(sample.token_ids) for sample in samples) * (ROW_BYTES + 8)
    for position in range(offset, len(content), 37):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        mapped = MappedShard(path, file_info(make_manifest()), 1)
        wrong = 0
        for one in placed:
            try:
                mapped.read(((one.row, one.row + one.num_rows),), one.checksum)
            except CorruptError:
                wrong += 1
        assert wrong == 1


def test_cut_missing_and_foreign_files_are_told_apart(shard):
    path, _, _ = shard
    content = path.read_bytes()
    for size in (0, 5, 4000, len(content) - 1, len(content) - ROW_BYTES - 7):
        path.write_bytes(content[:size])
        with pytest.raises(TornError):
            MappedShard(path, file_info(make_manifest()), 1)
    path.write_bytes(content)
    with pytest.raises(TornError, match="fewer than the 9999"):
        MappedShard(path, file_info(make_manifest()), 9999)
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(ForeignError):
        MappedShard(path, file_info(make_manifest()), 1)
    path.unlink()
    with pytest.raises(MissingError, match="the index names this file"):
        MappedShard(path, file_info(make_manifest()), 1)
