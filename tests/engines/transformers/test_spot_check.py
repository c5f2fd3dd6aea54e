"""The spot check passes right rows of every way, finds what no single row shows, and comes as often as it is told to."""

from contextlib import closing

import pytest
import torch
from extraction_cases import engine, extract, random_prompts

from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.spot_check import SpotCheck


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["llama", "gptj", "mamba2", "mixtral"])
def test_right_rows_pass(name, dtype, tmp_path):
    compute = "float32" if dtype == "fp8_e4m3" else dtype
    with closing(engine(name, tmp_path, spot_check=1, dtype=compute)) as made:
        outcomes = extract(made, random_prompts([5, 40, 1, 17, 28]), [0, 2, made.info.num_layers], dtype=dtype)
        assert all(isinstance(outcome, torch.Tensor) for outcome in outcomes)
        assert (made.spot_check.checked, made.spot_check.failed) == (5, 0)


def test_swapped_rows_of_two_prompts_fail_both(tmp_path, monkeypatch):
    real = Passes.run

    def swapping(self, way, sequences, wanted, layers, rows):
        real(self, way, sequences, wanted, layers, rows)
        if len(sequences) == 2:
            rows.copy_(torch.cat([rows[20:], rows[:20]]))

    with closing(engine("llama", tmp_path, spot_check=1)) as made:
        made.routes()
        monkeypatch.setattr(Passes, "run", swapping)
        outcomes = extract(made, random_prompts([20, 20]), [1])
        assert all("got other rows: 20 of 20 in layer 1" in str(outcome) for outcome in outcomes)
        assert made.spot_check.failed == 2


def test_it_comes_once_in_so_many_prompts():
    for one_in, expected in ((1, 100), (10, 10), (100, 1), (0, 0)):
        check = SpotCheck(one_in=one_in)
        assert sum(check.due() for _ in range(100)) == expected
