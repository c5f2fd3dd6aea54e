import contextlib
import errno
import os
import subprocess
import sys

import pytest
from dataset_cases import ROW_BYTES, assert_holds, make_manifest, make_sample, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.datasets import writer as writer_module
from layertap.datasets.index import part_paths
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import leftovers, locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, ShardOptions
from layertap.errors import OptionError, StoreFullError

SMALL = ShardOptions(shard_bytes=20 * ROW_BYTES, fsync=False)


@settings(max_examples=25, deadline=None)
@given(
    st.permutations(range(12)), st.integers(1, 60), st.sets(st.integers(0, 11)), st.sampled_from(["shards", "files"])
)
def test_samples_in_any_order_come_back_in_the_order_of_the_input(tmp_path_factory, order, rows, failures, layout):
    folder = tmp_path_factory.mktemp("set") / "states"
    options = ShardOptions(shard_bytes=rows * ROW_BYTES, fsync=False)
    write_dataset(folder, order, layout=layout, failures=failures, options=options)
    assert_holds(folder, set(range(12)) - failures)
    assert [(one.index, one.reason) for one in open_dataset(folder).failures] == [
        (index, f"no {index}") for index in sorted(failures)
    ]


def test_a_shard_closes_when_it_has_its_bytes(folder):
    write_dataset(folder, range(30), options=SMALL)
    found = parts(folder)
    sizes = [sum(entry.tokens for entry in part) for part in found]
    assert all(size <= 20 for size in sizes)
    for size, following in zip(sizes, found[1:], strict=False):
        assert size + following[0].tokens > 20
    assert_holds(folder, range(30))


def test_a_shard_closes_when_its_time_is_up(folder):
    seconds = iter(range(0, 100_000, 4))
    write_dataset(folder, range(20), clock=lambda: next(seconds), options=ShardOptions(shard_seconds=10, fsync=False))
    assert [len(part) for part in parts(folder)] == [3] * 6 + [2]
    assert_holds(folder, range(20))


def test_shards_that_fill_up_with_rows_are_followed_by_larger_ones(folder, monkeypatch):
    monkeypatch.setattr(writer_module, "_FIRST_MAX_ROWS", 10)
    write_dataset(folder, range(40))
    assert_holds(folder, range(40))
    assert 3 <= len(part_paths(folder)) < 12


def test_a_folder_of_complete_shards_can_be_read_while_the_next_one_is_written(folder):
    with locked_folder(folder):
        prepared = prepare_folder(folder, make_manifest())
        with DatasetWriter(folder, prepared.manifest, SMALL) as writer:
            for index in range(30):
                writer.add(make_sample(index))
                seen = open_dataset(folder, verify=True)
                assert len(list(seen)) == len(seen) <= index + 1
    assert_holds(folder, range(30))


def test_what_was_complete_is_published_however_the_run_ends(folder):
    class Stop(BaseException):
        pass

    def run():
        with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, make_manifest()).manifest) as writer:
            writer.add(make_sample(0))
            writer.add(make_sample(1))
            raise Stop

    with pytest.raises(Stop):
        run()
    assert_holds(folder, [0, 1])
    assert not list(folder.glob("**/.*tmp"))


def test_single_files_are_whole_layertap_files_with_their_own_facts(folder):
    from layertap.files.read import read_file

    write_dataset(folder, [7], layout="files")
    loaded = read_file(folder / "samples" / "000000" / "000000007.safetensors")
    assert loaded.info.prompt_len == len(make_sample(7).token_ids)
    assert (loaded.info.facts["finish_reason"], loaded.info.facts["index"]) == ("prefill", "7")


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(OptionError, match="shard_bytes"):
        ShardOptions(shard_bytes=0)
    with pytest.raises(OptionError, match="shard_seconds"):
        ShardOptions(shard_seconds=0)


@pytest.mark.parametrize("kilobytes", [64, 96, 800, 900, 1200, 1500])
@pytest.mark.parametrize("layout", ["shards", "files"])
def test_a_full_disk_ends_the_run_with_its_reason_and_loses_no_finished_sample(tmpfs, kilobytes, layout, monkeypatch):
    monkeypatch.setattr(writer_module, "_FIRST_MAX_ROWS", 100)
    folder = tmpfs(kilobytes) / "states"
    with pytest.raises(StoreFullError, match="make room and run the same command again") as caught:
        write_dataset(folder, range(100_000), layout=layout)
    assert caught.value.errno == errno.ENOSPC
    found = open_dataset(folder, verify=True).indices.tolist()
    assert found or kilobytes < 100
    assert not list(folder.glob("**/.*tmp"))
    assert_holds(folder, found)


def test_a_full_disk_drops_the_last_samples_of_a_shard_rather_than_all_of_it(tmpfs):
    folder = tmpfs(2048) / "states"

    def run():
        options = ShardOptions(shard_seconds=1e9)
        with locked_folder(folder):
            manifest = prepare_folder(folder, make_manifest()).manifest
            with DatasetWriter(folder, manifest, options) as writer:
                for index in range(40):
                    writer.add(make_sample(index, tokens=100))
                # somebody else takes the rest
                with contextlib.suppress(OSError), (folder.parent / "other").open("wb") as other:
                    while True:
                        other.write(b"x" * 4096)
                        other.flush()

    with pytest.raises(StoreFullError, match=r"\d+ samples of the last shard were dropped"):
        run()
    ds = open_dataset(folder, verify=True)
    assert 30 <= len(list(ds)) < 40
    (folder.parent / "other").unlink()
    again = write_dataset(folder, [])
    assert len(again.done) == len(ds)
    assert again.damaged == []


def parts(folder):
    from layertap.datasets.index import load_entries

    return [load_entries(path, open_dataset(folder).manifest.id) for path in part_paths(folder)]


@pytest.fixture
def tmpfs(tmp_path):
    """Mount small file systems; a machine that doesn't let us mount can't run these tests."""
    mounted = []

    def mount(kilobytes):
        target = tmp_path / f"disk{len(mounted)}"
        target.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", target], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a tmpfs isn't permitted here: {done.stderr.strip()}")
        mounted.append(target)
        return target

    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root on Linux")
    yield mount
    for target in mounted:
        subprocess.run(["umount", "-l", target], check=True)


def test_an_offered_part_counts_once_its_owner_has_named_it(folder):
    with locked_folder(folder):
        manifest = prepare_folder(folder, make_manifest()).manifest
        offers = []
        offer = lambda *given: offers.append(given)  # noqa: E731
        with DatasetWriter(folder, manifest, ShardOptions(fsync=False), name="r1", offer=offer) as writer:
            for index in range(6):
                writer.add(make_sample(index))
                if index == 2:
                    writer.flush()
        assert len(open_dataset(folder)) == 0
        assert [[entry.index for entry in entries] for _, _, entries in offers] == [[0, 1, 2], [3, 4, 5]]
        temporary, path, _ = offers[1]
        temporary.replace(path)
        assert_holds(folder, range(3, 6))
        # the other one was never taken: it is a leftover
        for leftover in leftovers(folder, manifest):
            leftover.unlink()
    assert sorted(one.name for one in folder.glob("shards/*")) == ["r1-000001.index.parquet", "r1-000001.safetensors"]
