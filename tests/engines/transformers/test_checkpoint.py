"""Sharded checkpoints: only the shards that are needed, with whatever other files the folder has or lacks."""

import pytest

from layertap import LLM
from layertap.errors import ModelError
from layertap.testing import zoo
from layertap.testing.oracle import hidden_states


@pytest.fixture(scope="module")
def model():
    return zoo.build("qwen3")


@pytest.mark.parametrize("without", [None, "generation_config.json"])
def test_a_sharded_checkpoint_loads_with_and_without_a_generation_config(model, tmp_path, without):
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    if without is not None:
        (tmp_path / without).unlink(missing_ok=True)
    (sample,) = LLM(tmp_path).extract([[5, 6, 7, 8]], layers=[0, 2, -1])
    expected = hidden_states(model, [5, 6, 7, 8])[:, [0, 2, model.config.num_hidden_layers]]
    assert ((sample.hidden_states - expected).norm(dim=-1) <= 1e-4 * expected.norm(dim=-1)).all()


def test_a_missing_deep_shard_hurts_only_those_who_need_it(model, tmp_path):
    import json

    model.save_pretrained(tmp_path, max_shard_size="50KB")
    weights = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    deep = {shard for key, shard in weights.items() if key.startswith("model.layers.3.")}
    shallow = {
        shard for key, shard in weights.items() if not key.startswith("model.layers.3.") and "lm_head" not in key
    }
    (gone, *_) = sorted(deep - shallow)
    (tmp_path / gone).unlink()
    llm = LLM(tmp_path)
    (sample,) = llm.extract([[5, 6, 7]], layers=[3])
    assert sample.hidden_states.shape[0] == 3
    with pytest.raises(ModelError, match=gone):
        list(llm.extract([[5, 6, 7]], layers="last"))
