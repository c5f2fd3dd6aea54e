"""Data sets whose rows are compressed: whatever is done with a set goes with them, too."""

import json
from dataclasses import replace

import numpy as np
import pytest
from dataset_cases import ROW_BYTES, assert_holds, make_manifest, make_sample, write_dataset

from layertap import LLM
from layertap.datasets.export.arrays import export_numpy
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.importing import ImportOptions, import_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.inspection import view_sample
from layertap.datasets.loader import HiddenStatesStream
from layertap.datasets.manifest import read_manifest
from layertap.datasets.plan import make_plan
from layertap.datasets.reader import open_dataset
from layertap.datasets.shards import MappedShard
from layertap.datasets.verify import verify_parts
from layertap.datasets.writer import ShardOptions, file_info
from layertap.errors import CorruptError, OptionError, TornError
from layertap.files.read import load_hidden_states, read_header
from layertap.testing import zoo

OPTIONS = {"options": {"compress": "planes+zstd"}}


def manifest(layout="shards"):
    return make_manifest(layout, **OPTIONS)


@pytest.mark.parametrize("layout", ["shards", "files"])
def test_a_compressed_set_is_written_resumed_verified_and_read(folder, layout):
    options = ShardOptions(shard_bytes=20 * ROW_BYTES, fsync=False)
    write_dataset(folder, range(10), manifest=manifest(layout), options=options)
    prepared = write_dataset(folder, range(25), manifest=manifest(layout), options=options, failures={3})
    assert len(prepared.done) == 10
    assert_holds(folder, range(25))
    assert all(part.error is None for part in verify_parts(folder, read_manifest(folder)))
    assert json.loads((folder / "manifest.json").read_text())["format_version"] == 3
    name = open_dataset(folder).entry(0).file
    assert read_header(folder / name).info.packed is not None
    load_hidden_states(folder / name)
    assert view_sample(folder, 3).rows.shape[1:] == (2, 6)


def test_it_is_not_mixed_with_rows_that_are_not_compressed(folder):
    write_dataset(folder, range(3))
    with pytest.raises(OptionError, match=r"options\.compress: the data set has none, this run \"planes"):
        write_dataset(folder, range(6), manifest=manifest())


def test_loaders_and_exporters_read_it(folder, tmp_path):
    write_dataset(folder, range(12), manifest=manifest())
    found = {item["index"]: item["hidden_states"] for item in HiddenStatesStream(folder, seed=3)}
    assert sorted(found) == list(range(12))
    assert all(found[i].numpy().tobytes() == make_sample(i).rows.tobytes() for i in found)
    export_numpy(open_dataset(folder), tmp_path / "out")
    exported = np.load(tmp_path / "out" / "000000005.npz")["hidden_states"]
    assert exported.tobytes() == make_sample(5).rows.tobytes()


def test_shares_of_machines_are_joined(folder):
    for share in range(2):
        own = make_manifest(options={**OPTIONS["options"], "shard": f"{share}/2"})
        write_dataset(folder / f"shard-{share}-of-2", range(share, 9, 2), manifest=own)
    assert_holds(folder, range(9))


def test_files_of_compressed_rows_are_imported(folder, tmp_path):
    write_dataset(folder, range(6), manifest=manifest("files"))
    report = import_dataset(folder / "samples", tmp_path / "set", ImportOptions(format="files", compress=True))
    assert (report.num_samples, report.failures) == (6, [])
    found = open_dataset(tmp_path / "set", verify=True)
    assert found.manifest.rows.options["compress"] == "planes+zstd"
    assert found[4]["hidden_states"].numpy().tobytes() == make_sample(4).rows.tobytes()


def test_cut_and_damaged_shards_are_found(folder):
    write_dataset(folder, range(8), manifest=manifest())
    path = folder / open_dataset(folder).entry(0).file
    content = path.read_bytes()
    info = file_info(manifest())
    for size in (4096, len(content) - 1, len(content) - 8, len(content) - 16, len(content) - 32):
        path.write_bytes(content[:size])
        with pytest.raises((TornError, CorruptError)):
            MappedShard(path, info, 1)
    flipped = bytearray(content)
    flipped[8 + int.from_bytes(content[:8], "little") + 100] ^= 4
    path.write_bytes(flipped)
    with pytest.raises(CorruptError):
        open_dataset(folder).verify()
    prepared = write_dataset(folder, range(8), manifest=manifest())
    assert len(prepared.damaged) == 1
    assert_holds(folder, range(8))


def test_an_extraction_says_what_it_came_to_and_a_plan_what_it_would(tmp_path, folder):
    checkpoint = zoo.save("llama", tmp_path / "llama")
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": list(range(9, 40 + n))}) + "\n" for n in range(20)))
    options = RunOptions(layers=[0, 2, -1], save_dtype="bfloat16", compress=True, shards=ShardOptions(fsync=False))
    with LLM(checkpoint, dtype="float32", device="cpu") as llm:
        report = extract_dataset(llm, open_input(path), folder, options)
        extract_dataset(llm, open_input(path), tmp_path / "plain", replace(options, compress=False))
    packed, plain = open_dataset(folder, verify=True), open_dataset(tmp_path / "plain", verify=True)
    for one, other in zip(packed, plain, strict=True):
        assert (one["hidden_states"] == other["hidden_states"]).all()
    made = report.compression
    assert made.row_bytes == report.num_bytes
    assert 0 < made.stored_bytes < made.row_bytes
    assert made.seconds > 0
    assert (folder / packed.entry(0).file).stat().st_size < (tmp_path / "plain" / plain.entry(0).file).stat().st_size
    plan = make_plan(str(checkpoint), open_input(path), options, tmp_path, measure_seconds=0.2, device="cpu")
    assert plan.compression is not None
    assert plan.compression.row_bytes > plan.compression.stored_bytes > 0
    (saved,) = [size for option, size in plan.savings if option == "--compress"]
    assert saved < plan.disk_bytes
