import shutil

import pytest

from layertap.datasets.fingerprint import model_fingerprint, template_hash, tokenizer_hash
from layertap.testing.tokenizer import byte_tokenizer


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(bytes(3 << 20))
    (folder / "README.md").write_text("hello")
    return folder


def test_a_model_is_known_by_its_files_wherever_they_are(model, tmp_path):
    digest = model_fingerprint(str(model), None)
    (model / "README.md").write_text("changed")
    shutil.copytree(model, tmp_path / "copy")
    assert model_fingerprint(str(tmp_path / "copy"), None) == digest


@pytest.mark.parametrize("change", ["config", "head", "middle", "tail", "size", "name"])
def test_every_change_that_matters_changes_it(model, change):
    digest = model_fingerprint(str(model), None)
    weights = model / "a.safetensors"
    if change == "config":
        (model / "config.json").write_text("{ }")
    elif change == "name":
        weights.rename(model / "b.safetensors")
    elif change == "size":
        weights.write_bytes(bytes(3 * (1 << 20) + 1))
    else:
        with weights.open("r+b") as file:
            file.seek({"head": 10, "middle": 3 << 19, "tail": (3 << 20) - 10}[change])
            file.write(b"x")
    assert model_fingerprint(str(model), None) != digest


def test_fine_tuning_that_leaves_embeddings_and_last_norm_as_they_are_makes_another_model(model):
    weights = model / "a.safetensors"
    with weights.open("r+b") as file:
        file.truncate(512 << 20)  # sparse
        digest = model_fingerprint(str(model), None)
        file.seek(200 << 20)
        file.write(b"x" * (1 << 20))  # one small matrix
    assert model_fingerprint(str(model), None) != digest


def test_a_gguf_file_may_be_renamed(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" * 100)
    digest = model_fingerprint(str(tmp_path / "a.gguf"), None)
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    assert model_fingerprint(str(tmp_path / "b.gguf"), None) == digest


def test_a_model_that_isnt_here_has_none(tmp_path):
    assert model_fingerprint("org/no-such-model-here", None) is None
    assert model_fingerprint(str(tmp_path), None) is None


def test_tokenizers_differ_by_content_and_not_by_what_they_did():
    first, second = byte_tokenizer(), byte_tokenizer()
    second("some text", padding="max_length", truncation=True, max_length=3)
    assert tokenizer_hash(first) == tokenizer_hash(second)
    assert template_hash(first) == template_hash(second)
    assert tokenizer_hash(byte_tokenizer(300)) != tokenizer_hash(first)
    second.chat_template += " "
    assert template_hash(second) != template_hash(first)
    second.add_special_tokens({"additional_special_tokens": ["<new>"]})
    assert tokenizer_hash(second) != tokenizer_hash(first)
    assert tokenizer_hash(None) is None
    assert template_hash(None) is None
