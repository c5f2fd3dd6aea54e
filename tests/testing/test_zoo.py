"""The zoo is complete, deterministic, and its models really do what their layers are there for."""

import subprocess
import sys

import pytest
import torch
from packaging.version import Version

from layertap.testing import zoo

IDS = torch.arange(zoo.TOKEN_IDS.start, zoo.TOKEN_IDS.start + 24)[None]


def last_logits(model, ids):
    with torch.no_grad():
        return model(**zoo.decoder_inputs(model, ids), use_cache=False).logits[0, -1]


def with_first_changed(ids):
    changed = ids.clone()
    changed[0, 0] += 40
    return changed


def test_every_causal_architecture_of_transformers_is_in_the_zoo_or_listed_with_a_reason():
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {case.model_type for case in zoo.CASES.values()} | zoo.UNBUILDABLE.keys() | zoo.SAME_AS.keys()
    missing = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known
    if Version(transformers.__version__) < Version("5.25"):
        assert not missing
    assert len({case.model_type for case in zoo.CASES.values() if case.kind == "causal"}) >= 60


def test_reasons_are_sentences_and_no_name_is_both_built_and_refused():
    assert not zoo.UNBUILDABLE.keys() & zoo.CASES.keys()
    assert all(len(reason.split()) > 5 for reason in zoo.UNBUILDABLE.values())


@pytest.mark.slow
def test_no_window_is_longer_than_eight_tokens():
    fields = ("sliding_window", "attention_chunk_size", "local_attention", "window_size", "attention_window_size")
    windows = {
        (name, field): getattr(zoo.config(name).get_text_config(decoder=True), field, None)
        for name in zoo.CASES
        for field in fields
    }
    assert {key: value for key, value in windows.items() if value is not None and value > 8} == {}
    assert sum(value is not None for value in windows.values()) > 40


@pytest.mark.parametrize("name", zoo.UNBUILDABLE)
def test_what_cannot_be_built_says_why_when_asked_for(name):
    with pytest.raises(KeyError, match=zoo.UNBUILDABLE[name].split(":")[0]):
        zoo.build(name)


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(KeyError, match="gemma2"):
        zoo.build("gemma7")


def test_what_came_with_a_later_transformers_says_so_when_asked_for(monkeypatch):
    monkeypatch.setitem(zoo.NEWER, "llama9", "9.1")
    for name, since in zoo.NEWER.items():
        with pytest.raises(KeyError, match=f"came with {since}"):
            zoo.build(name)


def test_names_cost_neither_torch_nor_transformers():
    code = (
        "import sys; from layertap.testing import zoo; assert len(zoo.CASES) > 200;"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["gemma2", "mamba2", "zamba2", "qwen3_moe", "deepseek_v4"])
def test_the_same_seed_gives_the_same_model_and_another_seed_another(name):
    torch.rand(3)
    first, torch_state = zoo.build(name), torch.get_rng_state()
    second, other = zoo.build(name), zoo.build(name, seed=1)
    assert torch.equal(torch.get_rng_state(), torch_state), "building must leave the caller's random state alone"
    assert torch.equal(last_logits(first, IDS), last_logits(second, IDS))
    assert not torch.allclose(last_logits(first, IDS), last_logits(other, IDS), atol=0.1)


def test_models_are_tiny_finite_float32_and_in_eval_mode(case_name, model):
    assert sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert torch.isfinite(last_logits(model, IDS)).all()


def test_each_token_matters_to_the_last_one(case_name, model):
    ids = IDS[:, :8]  # as long as the windows, so that it holds where all layers have one
    before, after = last_logits(model, ids), last_logits(model, with_first_changed(ids))
    assert (before - after).norm() / before.norm() > 1e-4


def test_windows_bite_at_forty_tokens():
    ids = torch.arange(zoo.TOKEN_IDS.start, zoo.TOKEN_IDS.start + 40)[None]
    windowed, full = zoo.build("mistral"), zoo.build("mistral-full")
    assert torch.equal(last_logits(windowed, ids), last_logits(windowed, with_first_changed(ids)))
    assert not torch.equal(last_logits(full, ids), last_logits(full, with_first_changed(ids)))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma2", "attn_logit_softcapping", None),
        ("cohere2", "sliding_window", 64),
        ("gemma3_text", "sliding_window", 64),
        ("gpt_oss", "sliding_window", 64),
        ("llama4_text", "attention_chunk_size", 64),
    ],
)
def test_what_makes_a_family_special_shows_in_its_logits(name, field, value):
    plain = zoo.build(name)
    before = last_logits(plain, IDS)
    setattr(plain.config, field, value)
    for module in plain.modules():
        if hasattr(module, field):
            setattr(module, field, value)
    after = last_logits(plain, IDS)
    assert (before - after).norm() / before.norm() > 1e-3


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic-ntk", "llama-llama3"])
def test_rotary_scaling_differs_from_the_plain_table_at_lengths_of_the_tests(name):
    base = zoo.build(zoo.case(name).model_type)
    scaled = zoo.build(name)
    scaled.load_state_dict(base.state_dict())
    difference = last_logits(base, IDS) - last_logits(scaled, IDS)
    assert difference.norm() / last_logits(base, IDS).norm() > 1e-3


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "phi3-longrope", "zamba2", "rwkv", "youtu", "t5", "qwen2_vl", "deepseek_v4"]
)
def test_a_saved_model_loads_as_it_was_built(name, tmp_path):
    folder = zoo.save(name, tmp_path)
    loaded = zoo.model_class(name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(last_logits(loaded, IDS), last_logits(zoo.build(name), IDS), rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_second_save_keeps_what_is_there(tmp_path):
    folder = zoo.save("llama", tmp_path)
    before = (folder / "model.safetensors").stat()
    assert zoo.save("llama", tmp_path) == folder
    assert (folder / "model.safetensors").stat() == before


def test_the_tokenizer_of_a_checkpoint_carries_any_text_and_a_chat(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo.save("llama", tmp_path))
    text = "Gr\u00fc\u00df Gott, the \u4e16\u754c \U0001f600\n\tend"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < zoo.config("llama").vocab_size
    assert len(tokenizer("there")["input_ids"]) < 5, "frequent pairs are one token"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<bos><|user|>hi<|end|><|assistant|>"


def test_facts_of_a_case_are_ready_for_a_table():
    import json

    table = json.loads(json.dumps(zoo.facts(["falcon-alibi", "mllama", "blt"], run=True)))
    assert table["falcon-alibi"]["class"] == "FalconForCausalLM"
    assert table["falcon-alibi"]["container_path"] == "transformer.h"
    assert table["falcon-alibi"]["num_layers"] == 4
    assert "does not run on text alone" in table["mllama"]["notes"][0]
    assert "model.local_decoder.layers" in table["blt"]["refused"]
