"""Folders that others wrote, imported, and compared with what was written into them."""

import fcntl
import shutil
from dataclasses import replace

import pytest
import torch
from dataset_cases import make_manifest, make_sample, write_dataset
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from layertap.cli.app import make_app
from layertap.datasets.export import refuse_gaps
from layertap.datasets.export.speculators import export_speculators
from layertap.datasets.importing import ImportOptions, import_dataset
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, file_info
from layertap.errors import OptionError
from layertap.files.format import row_digests
from layertap.files.publish import PendingFile

VLLM = ImportOptions(format="vllm", layers=[0, 3], num_layers=4)
MASKS = {0: ((1, 3), (4, 5)), 1: (), 2: ((0, 6),)}


def write_request(path, index=0, **changes):
    """A file of one request as layertap writes it; `changes` are of what it says."""
    sample = make_sample(index, tokens=6)
    facts = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "finish_reason": "stop",
        "revision": "",
        **changes.pop("facts", {}),
    }
    info = replace(file_info(make_manifest()), prompt_len=4, facts=facts, **changes)
    file = PendingFile(path, info, 6)
    file.write(0, 0, sample.rows.reshape(6, 2, -1))
    file.publish(
        first_row=0,
        token_ids=sample.token_ids,
        digests=row_digests(sample.rows, sample.token_ids),
        first_position=info.first_position,
        num_tokens=6 + info.first_position,
        facts={},
    )
    return sample


def write_vllm(path, seed=0, shape=(5, 2, 6), dtype=torch.bfloat16, tokens=None):
    """What ExampleHiddenStatesConnector saves."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(shape, generator=random).to(dtype)
    ids = torch.randint(0, 1000, (shape[0] if tokens is None else tokens,), generator=random)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"hidden_states": states, "token_ids": ids}, path)
    return states, ids


def reasons(folder):
    return {failed.sample_id: failed.reason for failed in open_dataset(folder).failures}


def test_files_of_requests_come_out_as_they_went_in(tmp_path, folder):
    source = tmp_path / "requests"
    source.mkdir()
    samples = [write_request(source / f"req-{index}.safetensors", index) for index in (2, 10)]
    report = import_dataset(source, folder, ImportOptions(format="files"))
    assert (report.num_samples, report.failures, report.num_tokens) == (2, [], 12)
    ds = open_dataset(folder, verify=True)
    rows = ds.manifest.rows
    assert (rows.engine, rows.engine_version, rows.tokenizer_hash, rows.residual) == (
        "imported",
        "unknown",
        None,
        "unknown",
    )
    assert (rows.model, rows.layers, rows.num_layers) == ("org/tiny", (0, 3), 4)
    assert rows.revision is None  # requests without a revision say ""
    assert rows.options["written_by.engine_version"] == "0.32.0"
    for position, (item, sample) in enumerate(zip(ds, samples, strict=True)):
        assert item["hidden_states"].numpy().tobytes() == sample.rows.tobytes()
        assert item["token_ids"].tolist() == sample.token_ids.tolist()
        assert (item["prompt_len"], item["loss_mask"]) == (4, None)
        assert ds.entry(position).finish_reason == "stop"
    # digits count as numbers
    assert [ds.entry(position).sample_id for position in (0, 1)] == ["req-2.safetensors", "req-10.safetensors"]


def test_files_of_vllm_come_out_as_they_went_in_and_what_they_do_not_say_is_unknown(tmp_path, folder):
    written = [write_vllm(tmp_path / "hs" / "deep" / f"{n}.safetensors", n, shape=(5 + n, 2, 6)) for n in range(3)]
    (tmp_path / "hs" / "deep" / "0.safetensors.lock").touch()
    (tmp_path / "hs" / "notes.txt").touch()
    report = import_dataset(tmp_path / "hs", folder, VLLM)
    assert (report.num_samples, report.failures, report.strangers) == (3, [], ["notes.txt"])
    ds = open_dataset(folder, verify=True)
    rows = ds.manifest.rows
    assert (rows.model, rows.engine, rows.compute_dtype, rows.residual) == ("unknown", "imported", "unknown", "unknown")
    assert (ds.layers, rows.hidden_size, rows.save_dtype) == ((0, 3), 6, "bfloat16")
    for item, (states, ids) in zip(ds, written, strict=True):
        assert torch.equal(item["hidden_states"], states)
        assert torch.equal(item["token_ids"], ids)
        assert (item["loss_mask"], item["prompt_len"]) == (None, -1)
    assert ds.entry(0).finish_reason == "unknown"


def test_an_export_for_speculators_comes_back_with_its_masks(tmp_path, folder):
    manifest = make_manifest(layers=(0, 4))
    with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, manifest).manifest) as writer:
        for index, mask in MASKS.items():
            writer.add(make_sample(index, tokens=6, loss_mask=mask))
    ours = open_dataset(folder)
    export_speculators(ours, tmp_path / "out")
    report = import_dataset(tmp_path / "out", tmp_path / "again", ImportOptions(format="speculators"))
    assert (report.failures, report.strangers) == ([], [])
    again = open_dataset(tmp_path / "again", verify=True)
    assert again.layers == (0, 4)
    for item, back in zip(ours, again, strict=True):
        assert item["hidden_states"].numpy().tobytes() == back["hidden_states"].numpy().tobytes()
        for key in ("token_ids", "loss_mask"):
            assert item[key].tolist() == back[key].tolist()
        assert item["prompt_len"] == back["prompt_len"]


def test_rows_of_speculators_that_are_of_other_tokens_or_gone_fail(tmp_path, folder):
    manifest = make_manifest(layers=(0, 4))
    with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, manifest).manifest) as writer:
        for index, mask in MASKS.items():
            writer.add(make_sample(index, tokens=6, loss_mask=mask))
    export_speculators(open_dataset(folder), tmp_path / "out")
    rows = tmp_path / "out" / "hidden_states"
    (rows / "hs_1.safetensors").unlink()
    tensors = load_file(rows / "hs_2.safetensors")
    (rows / "hs_2.safetensors").unlink()
    save_file({**tensors, "token_ids": tensors["token_ids"].flip(0)}, rows / "hs_2.safetensors")
    import_dataset(tmp_path / "out", tmp_path / "again", ImportOptions(format="speculators"))
    found = reasons(tmp_path / "again")
    assert "line 1 of the table has no file" in found["hidden_states/hs_1.safetensors"]
    assert "aren't those of line 2" in found["hidden_states/hs_2.safetensors"]


def test_samples_that_torch_saved_come_with_their_masks(tmp_path, folder):
    states = [torch.randn(4, 6), torch.randn(4, 6)]
    record = {"input_ids": torch.arange(4), "hidden_states": states, "loss_mask": torch.tensor([0, 1, 1, 0])}
    (tmp_path / "pt").mkdir()
    torch.save(record, tmp_path / "pt" / "data_0.pt")
    torch.save({**record, "loss_mask": torch.tensor([0, 1])}, tmp_path / "pt" / "data_1.pt")
    torch.save({**record, "hidden_states": [states[0], torch.randn(3, 6)]}, tmp_path / "pt" / "data_2.pt")
    whole = (tmp_path / "pt" / "data_0.pt").read_bytes()
    (tmp_path / "pt" / "data_3.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"input_ids": object}, tmp_path / "pt" / "data_4.pt")  # code, which isn't run
    options = ImportOptions(format="speculators", layers=[2, 4], num_layers=4)
    report = import_dataset(tmp_path / "pt", folder, options)
    (item,) = open_dataset(folder, verify=True)
    assert torch.equal(item["hidden_states"], torch.stack(states, 1))
    assert item["loss_mask"].tolist() == [False, True, True, False]
    assert [name for name, _ in report.failures] == [f"data_{n}.pt" for n in (1, 2, 3, 4)]
    with pytest.raises(OptionError, match="doesn't say which layers"):
        import_dataset(tmp_path / "pt", tmp_path / "no", ImportOptions(format="speculators"))


def test_every_file_that_is_no_sample_of_the_set_is_on_record_with_its_reason(tmp_path, folder):
    source = tmp_path / "requests"
    source.mkdir()
    write_request(source / "a.safetensors")
    write_request(source / "layers.safetensors", layers=(1, 3))
    write_request(source / "depth.safetensors", num_layers=5)
    write_request(source / "model.safetensors", model="org/other")
    write_request(source / "weights.safetensors", facts={"weights_version": "step-7"})
    write_request(source / "window.safetensors", first_position=3)
    write_request(source / "torn.safetensors")
    write_request(source / "flipped.safetensors")
    (source / "torn.safetensors").write_bytes((source / "a.safetensors").read_bytes()[:-9])
    content = bytearray((source / "a.safetensors").read_bytes())
    content[-60] ^= 1
    (source / "flipped.safetensors").write_bytes(content)
    write_vllm(source / "vllm.safetensors")
    (source / "gone.safetensors.error").write_text('{"reason": "disk full", "request_id": "r"}')
    write_dataset(tmp_path / "set", [0, 1])
    shutil.copy(tmp_path / "set" / "shards" / "w0-000000.safetensors", source / "shard.safetensors")
    (source / "zstray.txt").touch()
    report = import_dataset(source, folder, ImportOptions(format="files"))
    found = reasons(folder)
    assert report.num_samples == 1
    assert {name.removesuffix(".safetensors") for name in found} == {
        *("layers", "depth", "model", "weights", "window", "torn", "flipped", "vllm", "gone", "shard")
    }
    for name, reason in {
        "layers": "layers: [1, 3], the set has [0, 3]",
        "depth": "blocks: 5, the set has 4",
        "model": "'org/other', the set has 'org/tiny'",
        "weights": "weights_version: 'step-7', the set has None",
        "window": "first position: 3, the set has 0",
        "torn": "expected",
        "flipped": "don't match their checksums",
        "vllm": "not a file of layertap",
        "gone": "disk full",
        "shard": "a shard of 2 samples",
    }.items():
        assert reason in found[f"{name}.safetensors"], found
    assert report.strangers == ["zstray.txt"]


def test_torn_foreign_and_mismatching_files_of_vllm_fail_with_their_reason(tmp_path, folder):
    source = tmp_path / "hs"
    write_vllm(source / "a.safetensors")
    for name, how in {
        "dtype": {"dtype": torch.float16},
        "hidden": {"shape": (5, 2, 8)},
        "layers": {"shape": (5, 3, 6)},
        "tokens": {"tokens": 4},
        "flat": {"shape": (5, 12)},
        "none": {"shape": (0, 2, 6)},
        "torn": {},
        "held": {},
    }.items():
        write_vllm(source / f"{name}.safetensors", **how)
    (source / "torn.safetensors").write_bytes((source / "a.safetensors").read_bytes()[:-1])
    write_request(source / "ours.safetensors")
    (source / "killed.safetensors.lock").touch()
    save_file({"weight": torch.zeros(2)}, source / "weights.safetensors")
    with (source / "held.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        import_dataset(source, folder, VLLM)
    found = {name.removesuffix(".safetensors"): reason for name, reason in reasons(folder).items()}
    expected = {
        "dtype": "dtype: 'float16', the set has 'bfloat16'",
        "hidden": "hidden size: 8, the set has 6",
        "layers": "layers: 3, the set has 2",
        "tokens": "5 rows of 4 tokens",
        "flat": "expected floats [tokens, layers, hidden]",
        "none": "no rows",
        "torn": "no whole safetensors file",
        "held": "still being written",
        "ours": "import it from 'files'",
        "killed": "which is gone, and no file",
        "weights": "holds ['weight']",
    }
    assert found.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in found[name], (name, found[name])
    # the next import tries what failed again, and nothing else
    again = import_dataset(source, folder, VLLM)
    assert (again.num_samples, again.num_skipped, len(again.failures)) == (1, 1, len(expected) - 1)
    assert len(open_dataset(folder, verify=True)) == 2


def test_an_import_that_was_stopped_goes_on_and_changed_folders_are_refused(tmp_path, folder):
    source = tmp_path / "hs"
    written = [write_vllm(source / f"{n}.safetensors", n) for n in range(4)]

    def stop(done, _all):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_dataset(source, folder, VLLM, on_file=stop)
    assert len(open_dataset(folder)) == 2
    report = import_dataset(source, folder, VLLM)
    assert (report.num_skipped, report.num_samples) == (2, 2)
    for item, (states, _) in zip(open_dataset(folder, verify=True), written, strict=True):
        assert torch.equal(item["hidden_states"], states)
    with pytest.raises(OptionError, match="made from something else"):
        import_dataset(source, folder, replace(VLLM, layers=[1, 3]))
    write_vllm(source / "00.safetensors", 9, shape=(7, 2, 6))
    with pytest.raises(OptionError, match="made from another file"):
        import_dataset(source, folder, VLLM)


def test_rows_that_begin_later_keep_their_positions(tmp_path, folder):
    source = tmp_path / "requests"
    source.mkdir()
    write_request(source / "a.safetensors", first_position=3)
    import_dataset(source, folder, ImportOptions(format="files"))
    (item,) = open_dataset(folder, verify=True)
    assert item["positions"].tolist() == [3, 4, 5, 6, 7, 8]
    with pytest.raises(OptionError, match="begin at later positions"):
        refuse_gaps(open_dataset(folder))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "vllm"}, "don't say which layers"),
        ({"format": "files", "layers": [1]}, "give both or neither"),
        ({"format": "vllm", "layers": [1], "num_layers": 4}, r"\[1\] are 1, but"),
        ({"format": "vllm", "layers": [1, 9], "num_layers": 4}, "doesn't exist"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_written(tmp_path, folder, options, reason):
    write_vllm(tmp_path / "hs" / "a.safetensors")
    with pytest.raises(OptionError, match=reason):
        import_dataset(tmp_path / "hs", folder, ImportOptions(**options))
    assert not folder.exists()


def test_folders_that_cannot_be_meant_are_refused(tmp_path, folder):
    write_dataset(tmp_path / "set", [0])
    (tmp_path / "empty").mkdir()
    write_vllm(tmp_path / "hs" / "a.safetensors")
    for source, out, reason in [
        ("set", folder, "a data set of layertap already"),
        ("empty", folder, "holds no files"),
        ("nowhere", folder, "no such folder"),
        ("hs", tmp_path / "hs" / "out", "can't lie in the folder"),
    ]:
        with pytest.raises(OptionError, match=reason):
            import_dataset(tmp_path / source, out, VLLM)
        assert not out.exists()
    with pytest.raises(OptionError, match="none of 1 files can be read"):
        import_dataset(tmp_path / "hs", folder, ImportOptions(format="files"))


def test_the_command_says_what_it_did_and_ends_with_3_where_files_failed(tmp_path, folder):
    write_vllm(tmp_path / "hs" / "a.safetensors")
    words = [
        "import",
        str(tmp_path / "hs"),
        "--from",
        "vllm",
        "--out",
        str(folder),
        "--layers",
        "0,-1",
        "--num-layers",
        "4",
    ]
    done = CliRunner().invoke(make_app(), words)
    assert (done.exit_code, open_dataset(folder).layers) == (0, (0, 4)), done.output
    assert "1 sample, 5 tokens" in done.output
    (tmp_path / "hs" / "b.safetensors").write_bytes(b"no")
    done = CliRunner().invoke(make_app(), words)
    assert (done.exit_code, "b.safetensors: 2 bytes" in done.output) == (3, True), done.output
    assert CliRunner().invoke(make_app(), ["verify", str(folder)]).exit_code == 0
    assert "unknown" in CliRunner().invoke(make_app(), ["inspect", str(folder), "--sample", "0"]).output
    assert CliRunner().invoke(make_app(), words[:-4]).exit_code == 2
