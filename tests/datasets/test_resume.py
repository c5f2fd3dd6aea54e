import os
import shutil
from pathlib import Path

import pytest
from dataset_cases import ROW_BYTES, assert_holds, make_manifest, write_dataset

from layertap.datasets.index import part_paths
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import leftovers, locked_folder, open_records, prepare_folder, refuse_changed_input
from layertap.datasets.writer import ShardOptions
from layertap.errors import OptionError, TargetExistsError

SMALL = ShardOptions(shard_bytes=20 * ROW_BYTES, fsync=False)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.glob("**/*") if path.is_file()}


@pytest.mark.parametrize("layout", ["shards", "files"])
def test_a_second_run_adds_what_is_missing_and_rewrites_nothing(folder, layout):
    write_dataset(folder, range(0, 12, 2), layout=layout, options=SMALL)
    before = content(folder)
    prepared = write_dataset(folder, range(12), layout=layout, options=SMALL)
    assert prepared.done.index.tolist() == list(range(0, 12, 2))
    after = content(folder)
    assert {path: after[path] for path in before} == before
    assert_holds(folder, range(12))
    write_dataset(folder, range(12), layout=layout, options=SMALL)
    assert content(folder) == after


def test_failed_inputs_are_tried_again(folder):
    write_dataset(folder, range(4), failures={1, 2})
    write_dataset(folder, range(4), failures={2})
    assert_holds(folder, [0, 1, 3])
    assert [(one.index, one.reason) for one in open_dataset(folder).failures] == [(2, "no 2")]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "swap", "index"])
@pytest.mark.parametrize("layout", ["shards", "files"])
def test_damaged_parts_are_set_aside_and_computed_again(folder, layout, damage):
    write_dataset(folder, range(12), layout=layout, options=SMALL)
    entry = open_dataset(folder).entry(0)
    path = folder / entry.file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) - entry.tokens * (ROW_BYTES + 8) + 3] ^= 4
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "remove":
        path.unlink()
    elif damage == "swap":
        shutil.copy(folder / open_dataset(folder).entry(-1).file, path)
    else:
        part = part_paths(folder)[0]
        part.write_bytes(part.read_bytes()[:-1])
    prepared = write_dataset(folder, range(12), layout=layout, options=SMALL)
    assert len(prepared.damaged) == 1
    assert len(prepared.done) < 12
    assert (folder / "damaged" / "w0-000000" / "w0-000000.index.parquet").exists()
    assert_holds(folder, range(12))
    assert write_dataset(folder, range(12), layout=layout, options=SMALL).damaged == []


def test_a_quick_check_trusts_rows_and_finds_the_rest(folder):
    write_dataset(folder, range(12), options=SMALL)
    path = folder / open_dataset(folder).entry(0).file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with locked_folder(folder):
        assert prepare_folder(folder, make_manifest(), check_rows=False).damaged == []
    path.write_bytes(data[:-1])
    with locked_folder(folder):
        assert len(prepare_folder(folder, make_manifest(), check_rows=False).damaged) == 1


def test_rows_that_were_made_differently_are_refused_and_nothing_is_touched(folder):
    write_dataset(folder, range(4))
    before = content(folder)
    for changed in (make_manifest(layers=(1, 2)), make_manifest("files"), make_manifest(revision="def")):
        with pytest.raises(OptionError, match="must not be mixed"):
            write_dataset(folder, range(6), manifest=changed)
    assert content(folder) == before


def test_a_folder_of_other_things_is_refused(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(OptionError, match="isn't empty and no data set"):
        write_dataset(folder, range(2))
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_a_second_job_is_told_that_the_folder_is_taken(folder):
    with (
        locked_folder(folder),
        pytest.raises(TargetExistsError, match=rf"another job is writing to this data set: .*process {os.getpid()}"),
    ):
        write_dataset(folder, range(2))
    write_dataset(folder, range(2))
    assert_holds(folder, range(2))


def test_leftovers_of_a_killed_writer_are_found_and_removed_and_nothing_else(folder):
    write_dataset(folder, range(8), options=SMALL)
    shard = folder / open_dataset(folder).entry(0).file
    strays = [
        folder / ".manifest.json.0123abcd.layertap-tmp",
        folder / "shards" / ".w0-000077.safetensors.0123abcd.layertap-tmp",
        folder / "shards" / "w0-000077.safetensors",
    ]
    for stray in strays:
        shutil.copy(shard, stray)
    assert set(leftovers(folder, open_dataset(folder).manifest)) == set(strays)
    write_dataset(folder, [])
    assert not any(stray.exists() for stray in strays)
    assert_holds(folder, range(8))


def test_numbers_of_shards_are_never_used_again(folder):
    write_dataset(folder, range(4))
    (folder / "shards" / "w0-000000.index.parquet").unlink()
    write_dataset(folder, range(4))
    write_dataset(folder, range(8))
    assert_holds(folder, range(8))


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "in.jsonl"

    def write(*prompts):
        path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
        return path

    return write


def finished(folder, path: Path, wanted):
    """A data set of some records of an input, by their true hashes."""
    import dataclasses

    from dataset_cases import make_sample

    from layertap.datasets.writer import DatasetWriter

    with locked_folder(folder):
        prepared = prepare_folder(folder, make_manifest())
        with DatasetWriter(folder, prepared.manifest) as writer:
            for record in open_input(path):
                if record.index in wanted:
                    writer.add(dataclasses.replace(make_sample(record.index), source_hash=record.source_hash))
        return prepare_folder(folder, make_manifest()).done


def test_an_input_that_only_grew_is_continued(folder, lines):
    done = finished(folder, lines("a", "b", "c"), {0, 2})
    source = open_input(lines("a", "b", "c", "d"))
    refuse_changed_input(source, done)
    assert [record.index for record in open_records(source, done)] == [1, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("a", "b", "x"), "line 3: the input has changed: sample 2"),
        (("b", "a", "c"), "line 1: the input has changed: sample 0"),
        (("a", "b"), "it has 2 prompts, the data set holds sample 2"),
    ],
)
def test_a_changed_input_is_refused_before_anything_is_added(folder, lines, changed, message):
    done = finished(folder, lines("a", "b", "c"), {0, 2})
    with pytest.raises(OptionError, match=message):
        refuse_changed_input(open_input(lines(*changed)), done)


def test_a_change_of_what_isnt_done_is_no_change(folder, lines):
    done = finished(folder, lines("a", "b", "c"), {0, 2})
    refuse_changed_input(open_input(lines("a", "x", "c")), done)
    refuse_changed_input(open_input(lines("a"), limit=1), done)
