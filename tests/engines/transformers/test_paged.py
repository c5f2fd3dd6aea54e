"""Batched generation through our own attention over transformers' paged cache, beside plain forwards."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2PreTrainedModel

from layertap.engines.transformers import trial
from layertap.engines.transformers.bench import Bench
from layertap.engines.transformers.paged import PAGED
from layertap.testing import zoo


def tried(name: str) -> trial._Outcome:
    model = zoo.build(name, attn_implementation="sdpa")
    text = model.config.get_text_config(decoder=True)
    bench = Bench(model, text.num_hidden_layers, text.hidden_size, text.vocab_size).with_near_thresholds()
    with torch.inference_mode():
        return trial._try(bench, "batched", PAGED, trial._cases(bench, 256), torch.float32, 1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text", "olmo2", "phi3"])
def test_rows_and_tokens_are_those_of_plain_forwards(name):
    outcome = tried(name)
    assert outcome.trouble is None
    assert outcome.row_error < 1e-5


def test_a_soft_cap_is_left_to_others(monkeypatch):
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # later versions say themselves that it doesn't
    assert "soft cap or sinks" in str(tried("gemma2").trouble)
