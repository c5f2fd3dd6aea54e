"""The tap of generation: which rows are copied, and that a failing hook ends nobody's forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layertap.capture.blocks import find_blocks
from layertap.capture.request import CaptureSpec, Window
from layertap.engines.transformers.row_tap import Chunk, RowTap
from layertap.errors import EngineError
from layertap.files.values import to_float32
from layertap.testing import oracle, zoo

IDS = list(range(20, 32))


def spec(layers=(0, 2, 4), **changes):
    facts = {"dtype": "float32", "hidden_size": 64, "prompt_len": 6, "max_tokens": 8}
    return CaptureSpec(**{**facts, "layers": layers, "window": Window(include_output=True), **changes})


def chunk(key, owed, offset, count, start):
    return Chunk(key, owed, owed.candidates, offset, count, start)


def values(rows):
    return torch.from_numpy(rows.data.view(np.float32).copy())


def test_chunks_that_stand_apart_or_in_another_order_get_their_own_rows(model):
    tap = RowTap(model, find_blocks(model))
    places = {"a": (7, 2), "b": (0, 1), "c": (3, 3)}
    tap.expect([chunk(key, spec(), offset, count, offset) for key, (offset, count) in places.items()])
    with torch.no_grad():
        model(torch.tensor([IDS]))
    found = tap.collect(1)
    truth = oracle.hidden_states(model, IDS, [0, 2, 4])
    assert len(found) == len(places)
    for key, rows in found:
        offset, count = places[key]
        assert rows.input_ids.tolist() == IDS[offset : offset + count]
        torch.testing.assert_close(values(rows), truth[offset : offset + count])


@pytest.fixture(name="model")
def _model():
    return zoo.build("llama")


def test_each_capture_gets_its_rows_in_its_order_with_the_ids_that_were_fed(model):
    tap = RowTap(model, find_blocks(model))
    first = chunk("a", spec(), 0, 5, 0)
    second = chunk("b", spec(layers=(4, 1)), 5, 7, 5)
    third = chunk("c", spec(), 7, 2, 7)
    tap.expect([first, second, third])
    with torch.no_grad():
        model(torch.tensor([IDS]))
    found = dict(tap.collect(3))
    truth = oracle.hidden_states(model, IDS)
    for key, layers, span in (("a", [0, 2, 4], (0, 5)), ("b", [4, 1], (5, 12)), ("c", [0, 2, 4], (7, 9))):
        rows = found[key]
        assert (rows.step, rows.start, rows.input_ids.tolist()) == (3, span[0], IDS[slice(*span)])
        torch.testing.assert_close(values(rows), truth[slice(*span)][:, layers])
    assert tap.collect(4) == []
    tap.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_positions_that_cannot_be_owed_are_not_copied(model):
    tap = RowTap(model, find_blocks(model))
    tap.expect([chunk("a", spec(window=Window()), 0, 12, 0), chunk("b", spec(window=Window()), 0, 2, 6)])
    with torch.no_grad():
        model(torch.tensor([IDS]))
    ((key, rows),) = tap.collect(1)
    assert (key, rows.start, len(rows.data)) == ("a", 0, 6)


def test_half_precision_rows_are_the_rounded_ones(model):
    tap = RowTap(model, find_blocks(model))
    tap.expect([chunk("a", spec(dtype="bfloat16"), 0, 12, 0)])
    with torch.no_grad():
        model(torch.tensor([IDS]))
    ((_, rows),) = tap.collect(1)
    truth = oracle.hidden_states(model, IDS, [0, 2, 4]).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(rows.data.copy()).view(torch.bfloat16), truth)


def test_fp8_rows_are_the_quantized_ones(model):
    tap = RowTap(model, find_blocks(model))
    tap.expect([chunk("a", spec(dtype="fp8_e4m3"), 2, 9, 2)])
    with torch.no_grad():
        model(torch.tensor([IDS]))
    ((_, rows),) = tap.collect(1)
    assert rows.data.shape == (9, 3, 64 + 8)
    truth = oracle.hidden_states(model, IDS, [0, 2, 4])[2:11]
    read = torch.from_numpy(to_float32(rows.data, "fp8_e4m3"))
    assert ((read - truth).norm(dim=-1) <= truth.norm(dim=-1) / 16).all()


def test_a_hook_that_fails_lets_the_forward_end_and_says_why(model):
    tap = RowTap(model, find_blocks(model))
    tap.expect([chunk("a", spec(layers=(9,)), 0, 12, 0)])
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits
    with pytest.raises(EngineError, match="ended after layer 4"):
        tap.collect(1)
    tap.expect([chunk("a", spec(), 50, 3, 0)])
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([IDS])).logits, expected)
    with pytest.raises(EngineError, match="couldn't be taken"):
        tap.collect(2)
    tap.expect([chunk("a", spec(), 0, 3, 0)])
    with torch.no_grad():
        model(torch.tensor([IDS]))
    assert len(tap.collect(3)) == 1


def test_a_forward_that_never_ran_is_an_error_not_old_rows(model):
    tap = RowTap(model, find_blocks(model))
    tap.expect([chunk("a", spec(), 0, 3, 0)])
    with pytest.raises(EngineError, match="without passing its blocks"):
        tap.collect(1)
