import contextlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.datasets.index import PART_SUFFIX, SCHEMA, SampleEntry, encode_part, load_entries
from layertap.datasets.lookup import load_lookup
from layertap.errors import CorruptError, ForeignError, HiddenStatesError

TEXT = st.one_of(st.none(), st.text(st.characters(codec="utf-8"), max_size=8))
ENTRIES = st.builds(
    SampleEntry,
    index=st.integers(0, 2**62),
    source_hash=st.text("0123456789abcdef", min_size=32, max_size=32),
    sample_id=TEXT,
    file=TEXT,
    row=st.integers(0, 2**40),
    tokens=st.integers(0, 2**31 - 1),
    prompt_tokens=st.integers(0, 2**31 - 1),
    finish_reason=TEXT,
    checksum=TEXT,
    error=TEXT,
)


def write_part(folder, name, entries, dataset="set"):
    (folder / "shards").mkdir(exist_ok=True)
    path = folder / "shards" / f"{name}{PART_SUFFIX}"
    path.write_bytes(encode_part(entries, dataset))
    return path


def entry(index, file="shards/a", row=0, **more: object):
    return SampleEntry(index=index, source_hash="0" * 32, file=file, row=row, tokens=2, **more)


@settings(max_examples=50, deadline=None)
@given(st.lists(ENTRIES, max_size=6))
def test_entries_come_back_as_they_were_written(tmp_path_factory, entries):
    path = write_part(tmp_path_factory.mktemp("index"), "w0-000000", entries)
    assert load_entries(path, "set") == entries


def test_halves_of_surrogate_pairs_are_spelled_out(tmp_path):
    """JSON's escapes can hold them in an id, names of files in a reason."""
    entry = SampleEntry(index=0, source_hash="0" * 32, sample_id="a\ud800b", error="in \udcff.jsonl: \u00e4")
    (tmp_path / f"a{PART_SUFFIX}").write_bytes(encode_part([entry], "id"))
    (read,) = load_entries(tmp_path / f"a{PART_SUFFIX}", "id")
    assert (read.sample_id, read.error) == ("a\\ud800b", "in \\udcff.jsonl: \u00e4")


def test_a_part_is_plain_parquet_with_the_documented_columns(tmp_path):
    path = write_part(tmp_path, "w0-000000", [entry(3)])
    table = pq.read_table(path)
    assert table.schema.remove_metadata() == SCHEMA.remove(SCHEMA.get_field_index("before"))
    assert table.column("index").to_pylist() == [3]
    assert table.column("loss_mask").null_count == 1


def test_the_lookup_follows_the_input_over_all_parts_and_leaves_failures_out(tmp_path):
    write_part(tmp_path, "w0-000001", [entry(1, "shards/b"), entry(4, "shards/b", 2)])
    write_part(tmp_path, "w0-000000", [entry(5), entry(2, None, error="too long"), entry(0, row=2)])
    lookup = load_lookup(tmp_path, "set")
    assert lookup.index.tolist() == [0, 1, 4, 5]
    assert [lookup.files[code] for code in lookup.file] == ["shards/a", "shards/b", "shards/b", "shards/a"]
    assert lookup.row.tolist() == [2, 0, 2, 0]
    assert (lookup.part.tolist(), lookup.line.tolist()) == ([0, 1, 1, 0], [2, 0, 1, 0])
    write_part(tmp_path, "w0-000002", [entry(4)])
    with pytest.raises(CorruptError, match="sample 4 stands in the index twice"):
        load_lookup(tmp_path, "set")


def test_no_index_at_all_is_an_empty_lookup(tmp_path):
    assert len(load_lookup(tmp_path, "set")) == 0
    write_part(tmp_path, "w0-000000", [entry(2, None, error="too long")])
    assert len(load_lookup(tmp_path, "set")) == 0


def test_parts_of_another_set_and_other_parquet_files_are_refused(tmp_path):
    path = write_part(tmp_path, "w0-000000", [entry(1)], dataset="other")
    with pytest.raises(ForeignError, match=r"belongs to another data set \(id other, not set\)"):
        load_lookup(tmp_path, "set")
    pq.write_table(pa.table({"index": [1]}), path)
    with pytest.raises(ForeignError, match="not a part of an index"):
        load_lookup(tmp_path, "set")


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    entries = [entry(index, row=2 * index, sample_id=f"s{index}", checksum="c" * 32) for index in range(3)]
    path = write_part(tmp_path, "w0-000000", entries)
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with contextlib.suppress(HiddenStatesError):
            assert load_entries(path, "set") == entries


def test_a_cut_part_is_a_clear_error(tmp_path):
    path = write_part(tmp_path, "w0-000000", [entry(1)])
    content = path.read_bytes()
    for size in (0, 3, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CorruptError, match="the index can't be read"):
            load_entries(path, "set")
