"""What no model gives is refused with its reason; what a model may give is never refused."""

import numpy as np
import pytest
from file_cases import make_data, make_recorder, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.assembly import Rows
from layertap.capture.request import Window
from layertap.errors import EngineError, HiddenStatesError
from layertap.files.read import load_hidden_states
from layertap.writing.checks import finite


def through(recorder, spec, rows, ids, path=None, name="r"):
    capture = recorder.admit(spec, request_id=name, path=path)
    capture.add(Rows(0, 0, ids, slice(0, len(spec.layers)), rows))
    return capture.finish(ids, "prefill").result(30)


@pytest.fixture(params=["float32", "bfloat16", "float16", "fp8_e4m3"])
def case(request):
    spec = make_spec(num_rows=12, layers=(0, 3, 1), dtype=request.param)
    rows, _ = make_data(spec)
    return spec, rows.copy(), np.arange(12) % 9


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
@settings(deadline=None)
def test_finite_agrees_with_numpy(values):
    singles = np.array(values, np.float32)
    assert finite(singles.view(np.uint8), "float32") == bool(np.isfinite(singles).all())
    with np.errstate(over="ignore"):
        halves = singles.astype(np.float16)
    assert finite(halves.view(np.uint8), "float16") == bool(np.isfinite(halves).all())
    brains = (singles.view(np.uint32) >> 16).astype(np.uint16)
    widened = (brains.astype(np.uint32) << 16).view(np.float32)
    assert finite(brains.view(np.uint8), "bfloat16") == bool(np.isfinite(widened).all())


@pytest.mark.parametrize("bits", ["nan", "inf", "-inf", "-nan"])
def test_one_value_that_is_not_finite_fails_the_request_with_its_place(case, bits, tmp_path):
    spec, rows, ids = case
    if spec.dtype == "fp8_e4m3":  # has no infinity: the scale has
        place = slice(-8, -4) if "inf" in bits else 5
        rows[7, 1, place] = (
            np.array([float(bits)], "<f4").view(np.uint8) if "inf" in bits else 0x7F | ("-" in bits) << 7
        )
    else:
        pattern = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[spec.dtype]
        integer = np.uint32 if spec.dtype == "float32" else np.uint16
        value = pattern | ("nan" in bits) | ((1 << (8 * integer().itemsize - 1)) if "-" in bits else 0)
        rows.view(integer)[7, 1, 5] = value
    path = tmp_path / "a.safetensors"
    with pytest.raises(EngineError, match="1 of 36 rows hold NaN or infinity, first at position 7, layer 3"):
        through(make_recorder(), spec, rows, ids, path)
    with pytest.raises(HiddenStatesError, match="NaN"):
        load_hidden_states(path)


def test_a_row_that_was_not_finite_and_was_computed_again_is_delivered(case):
    spec, rows, ids = case
    bad = rows.copy()
    bad[4:6] = 0xFF
    capture = make_recorder().admit(spec, request_id="r", path=None)
    capture.add(Rows(0, 0, ids, slice(0, 3), bad))
    capture.add(Rows(1, 4, ids[4:6], slice(0, 3), rows[4:6]))
    assert capture.finish(ids, "prefill").result(30).rows.tobytes() == rows.tobytes()


@pytest.mark.parametrize("fault", ["all zero", "zeros behind a row", "one row for all", "a stale row"])
def test_zero_and_stale_rows_fail_the_request(case, fault):
    spec, rows, ids = case
    match fault:
        case "all zero":
            rows[:, 1] = 0
        case "zeros behind a row":
            rows[8:, 2] = 0
        case "one row for all":
            rows[:, 1] = rows[0, 1]
        case "a stale row":
            rows[6, 1] = rows[5, 1]
    with pytest.raises(EngineError, match="zero|the same as the one before"):
        through(make_recorder(), spec, rows, ids)


def test_what_a_model_may_give_passes(case):
    spec, rows, ids = case
    recorder = make_recorder()
    for number, change in enumerate(("pad", "zero prefix", "same token", "shared embedding", "nearly")):
        mine, tokens = rows.copy(), ids.copy()
        if change == "pad":  # a padding token has an embedding of zeros
            mine[3, 0] = 0
        elif change == "zero prefix":  # and alone at the beginning it stays zero
            mine[0] = 0
        elif change == "same token":
            tokens[4:8] = 5
            mine[4:8] = mine[4]
        elif change == "shared embedding":
            mine[6:9, 0] = mine[6, 0]
        else:  # the first bytes agree, the rest doesn't
            mine[:, :, :8] = mine[0, 0, :8]
        through(recorder, spec, mine, tokens, name=str(number))


def test_rows_of_another_request_fail_the_second_and_equal_prompts_pass(case):
    spec, rows, ids = case
    recorder = make_recorder()
    through(recorder, spec, rows, ids, name="first")
    through(recorder, spec, rows, ids, name="again")
    with pytest.raises(EngineError, match="byte for byte one of request again"):
        through(recorder, spec, rows, ids + 1, name="third")


def test_rows_outside_of_the_window_are_not_judged(case):
    spec, rows, ids = case
    windowed = make_spec(num_rows=12, layers=(0, 3, 1), dtype=spec.dtype, window=Window(positions=(0, 6)))
    rows[6:] = 0xFF
    assert len(through(make_recorder(), windowed, rows, ids).token_ids) == 6
