"""Exports, read back by what others would read them with."""

import importlib.util
import json
import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_cases import make_manifest, make_sample, write_dataset
from safetensors.torch import load_file
from typer.testing import CliRunner

from layertap.cli.app import make_app
from layertap.datasets.export.speculators import export_speculators
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter
from layertap.errors import OptionError

MASKS = {0: ((1, 3), (4, 5)), 1: (), 4: ((0, 6),)}


@pytest.fixture
def states(folder):
    manifest = make_manifest(layers=(0, 4), save_dtype="bfloat16", hidden_size=12)
    with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, manifest).manifest) as writer:
        for index, mask in MASKS.items():
            writer.add(make_sample(index, tokens=6, loss_mask=mask))
    return folder


def export(folder, out, format):
    return CliRunner().invoke(make_app(), ["export", str(folder), str(out), "--format", format])


def as_mask(spans):
    return [int(any(start <= at < end for start, end in spans)) for at in range(6)]


def test_speculators_finds_its_columns_and_files(states, tmp_path):
    out = tmp_path / "out"
    assert export(states, out, "speculators").exit_code == 0
    with pa.OSFile(str(out / "data-00000-of-00001.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.column("loss_mask").to_pylist() == [as_mask(spans) for spans in MASKS.values()]
    assert table.column("seq_len").to_pylist() == [6, 6, 6]
    assert json.loads((out / "state.json").read_text())["_format_type"] == "torch"
    for position, index in enumerate(MASKS):
        sample = make_sample(index, tokens=6)
        tensors = load_file(out / "hidden_states" / f"hs_{position}.safetensors")
        assert tensors["token_ids"].tolist() == table.column("input_ids")[position].as_py() == sample.token_ids.tolist()
        assert tensors["hidden_states"].shape == (6, 2, 12)
        assert tensors["hidden_states"].view(torch.uint8).numpy().tobytes() == sample.rows.tobytes()


@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="speculators isn't installed")
def test_the_reader_of_speculators_takes_the_export(states, tmp_path):
    from speculators.train.data import ArrowDataset

    export(states, tmp_path / "out", "speculators")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = ArrowDataset(max_len=64, datapath=tmp_path / "out", on_missing="raise")
        items = list(map(theirs.__getitem__, range(len(theirs))))
    for item, ours in zip(items, open_dataset(states), strict=True):
        assert item["input_ids"].tolist() == ours["token_ids"].tolist()
        assert item["loss_mask"].tolist() == ours["loss_mask"].long().tolist()
        assert torch.equal(item["hidden_states"].view(torch.int16), ours["hidden_states"][:, 0].view(torch.int16))
        last = item["verifier_last_hidden_states"]
        assert torch.equal(last.view(torch.int16), ours["hidden_states"][:, -1].view(torch.int16))


def test_what_speculators_cannot_take_is_refused_before_anything_is_written(states, tmp_path):
    out = tmp_path / "out"
    write_dataset(tmp_path / "unmasked", [0], manifest=make_manifest(layers=(0, 4)))
    write_dataset(tmp_path / "early", [0], manifest=make_manifest(layers=(0, 3)))
    write_dataset(tmp_path / "gaps", [0], manifest=make_manifest(layers=(0, 4), options={"positions": "trained"}))
    for name, reason in (("unmasked", "no loss mask"), ("early", "has to be 4"), ("gaps", "trained positions only")):
        with pytest.raises(OptionError, match=reason):
            export_speculators(open_dataset(tmp_path / name), out)
        assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    result = export(states, out, "speculators")
    assert (result.exit_code, [path.name for path in out.iterdir()]) == (2, ["mine"])


def test_numpy_files_hold_every_value(states, tmp_path):
    assert export(states, tmp_path / "out", "numpy").exit_code == 0
    for item in open_dataset(states):
        with np.load(tmp_path / "out" / f"{item['index']:09d}.npz") as found:
            expected = item["hidden_states"].float().numpy()
            assert np.array_equal(found["hidden_states"], expected, equal_nan=True)
            assert found["token_ids"].tolist() == item["token_ids"].tolist()
            assert found["loss_mask"].tolist() == item["loss_mask"].tolist()
            assert found["positions"].tolist() == list(range(6))
