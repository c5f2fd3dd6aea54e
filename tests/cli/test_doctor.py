"""`layertap doctor`: a good model passes, and each kind of wrong rows, or a bad folder, is named and changes the exit code."""

import json

import pytest
import torch
from typer.testing import CliRunner

from layertap.cli.app import make_app
from layertap.engines.transformers.passes import Passes
from layertap.testing import zoo
from layertap.trust.findings import Report
from layertap.trust.store import examine_store


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(zoo.save("llama", tmp_path_factory.mktemp("llama")))


def doctor(*words):
    return CliRunner().invoke(make_app(), ["doctor", *words], env={"COLUMNS": "130"})


def test_a_good_model_passes_every_check(checkpoint, tmp_path):
    done = doctor(checkpoint, "--storage", str(tmp_path), "--picture", str(tmp_path / "errors.svg"))
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "errors.svg").read_text()
    assert drawn.count("<svg") == 1
    (tmp_path / "errors.svg").unlink()
    for words in (
        "blocks",
        "model.layers",
        "layer ids",
        "last layer to logits",
        "in chunks",
        "generated and prefilled",
        "All good",
    ):
        assert words in done.output
    assert list(tmp_path.iterdir()) == []


def wrong_layer(rows):
    rows[:, 1:] = rows[:, :-1].clone()


def shifted(rows):
    rows.copy_(rows.roll(1, dims=0))


def last_layer_scaled(rows):
    rows[:, -1] *= 1.01


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (wrong_layer, {"layer ids", "against the reference"}),
        (shifted, {"against the reference", "last layer to logits"}),
        (last_layer_scaled, {"against the reference"}),
    ],
)
def test_wrong_rows_are_found_and_said(fault, named, checkpoint, tmp_path, monkeypatch):
    real = Passes.run

    def run(self, way, sequences, wanted, layers, rows):
        real(self, way, sequences, wanted, layers, rows)
        if rows.dtype == torch.float32 and self._adapt is None and len(layers) == 5 and len(rows) != 51:
            fault(rows)

    monkeypatch.setattr(Passes, "run", run)
    done = doctor(checkpoint, "--storage", str(tmp_path), "--json")
    assert done.exit_code == 3, done.output
    report = json.loads(done.output[done.output.index("{") :])
    assert report["verdict"] == "bad"
    assert named <= {finding["name"] for finding in report["findings"] if finding["state"] == "bad"}


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path):
    (tmp_path / "file").touch()
    report = Report(model="m", engine="transformers")
    examine_store(report, tmp_path / "file" / "folder")
    assert [finding.name for finding in report.bad] == ["writable"]


def test_a_model_that_cannot_be_loaded_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = doctor(str(tmp_path), "--storage", str(tmp_path / "store"), "--json")
    assert done.exit_code == 3
    assert json.loads(done.output)["verdict"] == "bad"
