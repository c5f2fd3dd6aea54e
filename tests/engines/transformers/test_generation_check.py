"""The spot check of generation passes right rows of every way of generating, and holds back what differs from a plain forward."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from generating import TIMEOUT, Client, info_for, prompt_of, row_error

from layertap import LLM, HiddenStatesError, SamplingParams, load_hidden_states
from layertap.capture.request import Window
from layertap.engines.transformers import generation_check
from layertap.engines.transformers.generate import GenerationOptions, Generator
from layertap.engines.transformers.row_tap import _Group
from layertap.engines.transformers.spot_check import SpotCheck
from layertap.testing import zoo

REASON = r"the spot check computed the sequence again and got other rows: .* in layer \d, worst at position \d+"


@pytest.mark.parametrize(("name", "way"), [("llama", "batched"), ("mamba2", "single"), ("mixtral", "batched")])
def test_right_rows_pass(name, way):
    model, check = zoo.build(name), SpotCheck(one_in=1)
    generator = Generator(model, None, info_for(model), GenerationOptions(max_num_batched_tokens=16), check)
    with closing(generator), closing(Client(generator, info_for(model))) as client:
        assert generator.verdict.way == way, generator.verdict
        answers = [client.ask(prompt_of(length, seed=length)) for length in (3, 50, 17, 1)]
        answers.append(client.ask(prompt_of(20), window=Window(positions="output", include_output=True), layers=[1]))
        for answer in answers[:4]:
            assert row_error(answer, model) < 1e-3
        assert answers[4].rows.shape[0] == 7
        assert (check.checked, check.failed) == (5, 0)
        assert 0 < check.worst < 1e-4


def test_a_long_sequence_is_checked_in_part(monkeypatch):
    monkeypatch.setattr(generation_check, "_MOST_ROWS", 5)
    model, check = zoo.build("llama"), SpotCheck(one_in=1)
    generator = Generator(model, None, info_for(model), spot_check=check)
    with closing(generator), closing(Client(generator, info_for(model))) as client:
        for seed in range(4):
            assert row_error(client.ask(prompt_of(30, seed=seed)), model) < 1e-4
        assert (check.checked, check.failed) == (4, 0)


def test_shifted_rows_are_never_published_and_the_reader_is_told(tmp_path, monkeypatch):
    real = _Group._rows
    params = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    with LLM(zoo.save("llama", tmp_path), layers=[1, 2, 4], storage=tmp_path / "states", spot_check=1) as llm:
        (right,) = llm.generate(
            [{"prompt_token_ids": prompt_of(9, seed=1)}], SamplingParams(max_tokens=2), use_tqdm=False
        )
        load_hidden_states(right.kv_transfer_params["hidden_states_path"])  # compared before it is published
        counts = llm._front.engine.spot_checks["generate"]
        assert (counts.checked, counts.failed) == (1, 0)
        monkeypatch.setattr(_Group, "_rows", lambda self, hidden: real(self, hidden.roll(1, dims=0)))
        (output,) = llm.generate([{"prompt_token_ids": prompt_of(12)}], params, use_tqdm=False)
        assert output.kv_transfer_params is not None
        path = Path(output.kv_transfer_params["hidden_states_path"])
        with pytest.raises(HiddenStatesError, match=REASON):
            load_hidden_states(path)
        assert not path.exists()
        assert (counts.checked, counts.failed) == (2, 1)


def test_sequences_without_rows_are_not_counted():
    model, check = zoo.build("llama"), SpotCheck(one_in=1)
    generator = Generator(model, None, info_for(model), spot_check=check)
    with closing(generator), closing(Client(generator, info_for(model))) as client:
        assert client.ask(prompt_of(5), window=None).last.finish_reason == "length"
        answer = client.ask(
            prompt_of(5),
            window=Window(positions=(2, 100), include_output=True),
            max_tokens=100,
            stop_token_ids=list(range(600)),
        )
        assert answer.capture is not None
        assert "outside" in str(answer.capture.result.exception(TIMEOUT))
        assert check.checked == 0
