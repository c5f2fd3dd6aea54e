"""The layouts of other trainers, read by readers of their own that know only what is documented of them."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_cases import make_manifest, make_sample
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from layertap import LLM
from layertap.cli.app import make_app
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter
from layertap.testing import zoo

CHATS = [[("user", "why?"), ("assistant", "because.")], [("user", "really?"), ("assistant", "yes!"), ("user", "oh")]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def states(checkpoint, tmp_path_factory):
    base = tmp_path_factory.mktemp("states")
    with (base / "chats.jsonl").open("w") as file:
        for number, chat in enumerate(CHATS):
            messages = [{"role": role, "content": content} for role, content in chat]
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    with LLM(checkpoint, dtype="float32", device="cpu") as llm:
        options = RunOptions(layers=[2, 0, 4], save_dtype="bfloat16")
        extract_dataset(llm, open_input(base / "chats.jsonl"), base / "states", options)
    return base / "states"


def export(folder, out, format, *more):
    return CliRunner().invoke(make_app(), ["export", str(folder), str(out), "--format", format, *map(str, more)])


def read_arrow(folder):
    """The one file that the state names, and the types that the metadata names."""
    state = json.loads((folder / "state.json").read_text())
    info = json.loads((folder / "dataset_info.json").read_text())
    with pa.OSFile(str(folder / state["_data_files"][0]["filename"])) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert json.loads(table.schema.metadata[b"huggingface"])["info"]["features"] == info["features"]
    assert list(info["features"]) == table.column_names
    return table, info["features"]


def test_specforge_files_hold_the_states_behind_the_models_own_norm(states, checkpoint, tmp_path):
    out = tmp_path / "out"
    result = export(states, out, "specforge", "--model", checkpoint)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files == ["rows_0-2000/data_0.ckpt", "rows_0-2000/data_1.ckpt"]
    for name, ours in zip(files, open_dataset(states), strict=True):
        record = torch.load(out / name, weights_only=True)
        assert record.keys() == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert record["input_ids"].tolist() == ours["token_ids"].tolist()
        assert record["loss_mask"].tolist() == ours["loss_mask"].long().tolist()
        tokens = len(ours["token_ids"])
        assert record["aux_hidden_state"].shape == (1, tokens, 2 * 64)
        assert torch.equal(record["aux_hidden_state"][0, :, :64], ours["hidden_states"][:, 0])
        assert torch.equal(record["aux_hidden_state"][0, :, 64:], ours["hidden_states"][:, 1])
        with torch.no_grad():
            expected = model.model(ours["token_ids"][None]).last_hidden_state
        torch.testing.assert_close(record["hidden_state"].float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("normed", [False, True], ids=["before the norm", "behind the norm"])
def test_modelopts_dump_says_whether_its_states_are_normed(states, checkpoint, tmp_path, normed):
    out = tmp_path / "out"
    result = export(states, out, "modelopt", *(("--model", checkpoint) if normed else ()))
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for number, ours in enumerate(open_dataset(states)):
        record = torch.load(out / f"{number:09d}.pt", weights_only=True)
        assert record["conversation_id"] == f"c{number}"
        assert record["input_ids"].tolist() == ours["token_ids"].tolist()
        assert record["loss_mask"].tolist() == ours["loss_mask"].long().tolist()
        assert torch.equal(record["aux_hidden_states"], ours["hidden_states"][:, :2].flatten(1))
        assert record["hidden_states_prenorm"] is not normed
        hidden = record["hidden_states"].float()
        with torch.no_grad():
            logits = model.lm_head(hidden if normed else model.model.norm(hidden))
            expected = model(ours["token_ids"][None]).logits[0]
        torch.testing.assert_close(logits, expected, rtol=5e-2, atol=5e-2)


def test_the_norm_of_another_model_is_not_applied(states, checkpoint, tmp_path):
    other = zoo.save("llama", tmp_path / "other", seed=1)
    for model, reason in ((other, "isn't the model of the data set"), (tmp_path / "none", "no such folder")):
        result = export(states, tmp_path / "out", "specforge", "--model", model)
        assert result.exit_code != 0
        assert reason in " ".join(result.output.split())
    result = export(states, tmp_path / "out", "specforge")
    assert "give the model, whose norm is applied" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_options_of_another_format_are_refused(states, tmp_path):
    for more in (("numpy", "--model", "m"), ("datasets", "--context-size", 4)):
        result = export(states, tmp_path / "out", *more)
        assert result.exit_code == 2
        assert f"{more[1]} is for the format" in " ".join(result.output.split())


@pytest.fixture
def mixed(folder):
    """Samples of several lengths, some without a mask, in a dtype that Arrow doesn't have."""
    manifest = make_manifest(layers=(0, 3, 4), save_dtype="bfloat16", hidden_size=8)
    with locked_folder(folder), DatasetWriter(folder, prepare_folder(folder, manifest).manifest) as writer:
        for index, tokens in ((0, 6), (3, 1), (4, 11)):
            mask = None if index == 3 else ((1, tokens),)
            writer.add(make_sample(index, tokens=tokens, row_bytes=48, loss_mask=mask))
    return folder


def test_the_arrow_folder_holds_every_value(mixed, tmp_path):
    assert export(mixed, tmp_path / "out", "datasets").exit_code == 0
    table, features = read_arrow(tmp_path / "out")
    assert features["hidden_states"] == {"shape": [None, 3, 8], "dtype": "float32", "_type": "Array3D"}
    field = table.schema.field("hidden_states")
    assert field.metadata[b"ARROW:extension:name"] == b"datasets.features.features.Array3DExtensionType"
    assert json.loads(field.metadata[b"ARROW:extension:metadata"]) == [[None, 3, 8], "float32"]
    rows = table.to_pylist()
    for row, ours in zip(rows, open_dataset(mixed), strict=True):
        expected = ours["hidden_states"].float().numpy()
        assert np.array_equal(np.array(row["hidden_states"], np.float32), expected, equal_nan=True)
        assert (row["index"], row["id"]) == (ours["index"], f"id-{ours['index']}")
        assert row["input_ids"] == ours["token_ids"].tolist()
        assert row["positions"] == ours["positions"].tolist()
        assert row["loss_mask"] == (None if ours["loss_mask"] is None else ours["loss_mask"].tolist())


@pytest.mark.parametrize("size", [1, 4, 18])
def test_cached_activations_hold_all_tokens_in_order_but_the_counted_rest(mixed, tmp_path, size):
    result = export(mixed, tmp_path / "out", "saelens", "--context-size", size)
    assert result.exit_code == 0, result.output
    left = 18 % size
    assert f"{left} token{'s' * (left != 1)} left out" in " ".join(result.output.split())
    table, features = read_arrow(tmp_path / "out")
    hooks = ["blocks.0.hook_resid_pre", "blocks.3.hook_resid_pre", "blocks.3.hook_resid_post"]
    assert list(features) == [*hooks, "token_ids"]
    assert features["token_ids"] == {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List", "length": size}
    items = list(open_dataset(mixed))
    kept = 18 // size * size
    expected = torch.cat([item["hidden_states"] for item in items]).float().numpy()[:kept]
    for slot, hook in enumerate(hooks):
        assert features[hook] == {"shape": [size, 8], "dtype": "float32", "_type": "Array2D"}
        found = np.array(table.column(hook).to_pylist(), np.float32).reshape(-1, 8)
        assert np.array_equal(found, expected[:, slot], equal_nan=True)
    found = np.array(table.column("token_ids").to_pylist()).reshape(-1)
    assert found.tolist() == torch.cat([item["token_ids"] for item in items]).tolist()[:kept]


def test_a_set_too_small_for_one_row_of_activations_is_refused(mixed, tmp_path):
    result = export(mixed, tmp_path / "out", "saelens", "--context-size", 19)
    assert result.exit_code == 2
    assert "18 in all" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def small(checkpoint, tmp_path_factory):
    base = tmp_path_factory.mktemp("small")
    chat = [{"role": role, "content": content} for role, content in CHATS[0]]
    (base / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    with LLM(checkpoint, dtype="float32", device="cpu") as llm:
        options = RunOptions(layers=[2, 0, 4], save_dtype="fp8_e4m3")
        extract_dataset(llm, open_input(base / "chats.jsonl"), base / "states", options)
    return base / "states"


@pytest.mark.parametrize("format", ["numpy", "datasets", "speculators", "specforge", "modelopt"])
def test_fp8_rows_are_exported_as_the_numbers_that_they_stand_for(small, checkpoint, tmp_path, format):
    numbers = open_dataset(small, dtype="float32")[0]["hidden_states"]
    out = tmp_path / "out"
    more = ["--model", checkpoint] if format in ("specforge", "modelopt") else []
    result = export(small, out, format, *more)
    assert result.exit_code == 0, result.output
    if format == "numpy":
        with np.load(next(out.glob("*.npz"))) as arrays:
            np.testing.assert_array_equal(arrays["hidden_states"], numbers.numpy())
        return
    if format == "datasets":
        table, _ = read_arrow(out)
        found = torch.tensor(table.column("hidden_states")[0].as_py())
    elif format == "speculators":
        found = load_file(out / "hidden_states" / "hs_0.safetensors")["hidden_states"]
    else:
        record = torch.load(next(path for path in out.rglob("*") if path.suffix in (".pt", ".ckpt")))
        # the last layer stands apart, behind the norm
        found, numbers = record.get("aux_hidden_states", record.get("aux_hidden_state")), numbers[:, :-1]
    assert torch.equal(found.float().reshape(numbers.shape), numbers.bfloat16().float())
