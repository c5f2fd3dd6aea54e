"""fp8 rows against an oracle that knows only the format's definition, and the kernel against torch's operators, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from layertap.capture.request import slot_bytes
from layertap.engines.fp8 import dequantize, put, quantize, storage
from layertap.errors import OptionError
from layertap.files.values import to_float32, to_tensors

# every number of e4m3fn from 0 up, by definition: 16 exponents of bias 7, three bits of mantissa, the last code is NaN
NUMBERS = np.array(
    [(m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
)[:127]


def oracle(row):
    """Codes and scale of one row of finite float32 numbers; nearest by distance in float64, ties to the even code."""
    largest = np.abs(row).max()
    if largest == 0:
        return np.zeros(len(row), np.uint8), np.float32(0)
    scale = max(np.float32(largest / np.float32(448)), np.float32(2.0**-126))
    scaled = np.abs(row / scale).astype(np.float64)
    assert scaled.max() <= 448.0001
    distance = np.abs(scaled[:, None] - NUMBERS)
    nearest = distance.argmin(axis=1)
    tied = (nearest < 126) & (distance[np.arange(len(row)), np.minimum(nearest + 1, 126)] == distance.min(axis=1))
    nearest = np.where(tied & (nearest % 2 == 1), nearest + 1, nearest)
    return (nearest | np.where(np.signbit(row), 0x80, 0)).astype(np.uint8), scale


def quantized(rows):
    slots = torch.full((len(rows), slot_bytes("fp8_e4m3", rows.shape[1])), 0xAA, dtype=torch.uint8)
    quantize(torch.from_numpy(rows), slots)
    return slots.numpy()


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows_of_any_size = np_st.arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([8, 16, 40])), elements=floats)
rows_of_usual_size = np_st.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.sampled_from([8, 64])), elements=st.floats(-3000, 3000, width=32)
)


@given(rows_of_any_size | rows_of_usual_size)
@settings(deadline=None)
def test_values_and_scales_are_those_of_the_definition(rows):
    slots = quantized(rows)
    hidden = rows.shape[1]
    for row, slot in zip(rows, slots, strict=True):
        codes, scale = oracle(row)
        assert slot[:hidden].tolist() == codes.tolist()
        assert slot[hidden : hidden + 4].view("<f4")[0] == scale
        assert not slot[hidden + 4 :].any()


@given(rows_of_any_size | rows_of_usual_size)
@settings(deadline=None)
def test_what_is_read_is_near_what_was_saved(rows):
    read = to_float32(quantized(rows)[:, None], "fp8_e4m3")[:, 0].astype(np.float64)
    largest = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    # half a step of three bits of mantissa; near zero half a step of the smallest numbers; and the least scale
    bound = np.maximum(np.abs(rows) / 16, np.maximum(largest / 448, 2.0**-126) * 2.0**-10) * (1 + 1e-6)
    assert (np.abs(read - rows) <= bound).all()
    assert np.isfinite(read).all()
    scaled = (largest / 448 >= 2.0**-126)[:, 0]  # below it the least scale is taken: the largest is rounded like any
    np.testing.assert_allclose(np.abs(read).max(axis=1)[scaled], largest[scaled, 0], rtol=2e-7)


def test_all_readers_give_the_same_numbers():
    rows = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32) * 7
    rows[3], rows[4, 5] = 0, 1e38
    slots = quantized(rows)
    floats = to_float32(slots[:, None], "fp8_e4m3")[:, 0]
    assert np.array_equal(dequantize(torch.from_numpy(slots)).numpy(), floats)
    raw = to_tensors(slots[:, None], "fp8_e4m3")
    assert (raw["hidden_states"].dtype, raw["hidden_states_scale"].dtype) == (torch.float8_e4m3fn, torch.float32)
    scaled = raw["hidden_states"].float() * raw["hidden_states_scale"][..., None]
    assert np.array_equal(scaled[:, 0].numpy(), floats)
    for dtype in ("float32", "bfloat16"):
        converted = to_tensors(slots[:, None], "fp8_e4m3", dtype)
        assert list(converted) == ["hidden_states"]
        assert torch.equal(converted["hidden_states"], scaled.to(getattr(torch, dtype)))


def test_raw_values_are_views_of_what_was_read():
    slots = quantized(np.ones((2, 8), np.float32))[:, None]
    tensors = to_tensors(slots, "fp8_e4m3")
    slots[1, 0, 0] = 0
    assert tensors["hidden_states"][1, 0, 0].float() == 0


def test_a_row_of_zeros_is_a_slot_of_zeros():
    assert not quantized(np.array([[0.0] * 8, [-0.0] * 8], np.float32)).any()


def test_a_massive_activation_is_kept_and_small_values_beside_it_keep_their_steps():
    row = np.full((1, 64), 1.0, np.float32)
    row[0, 17] = 12345.678
    read = to_float32(quantized(row)[:, None], "fp8_e4m3")[0, 0]
    assert abs(read[17] / row[0, 17] - 1) < 2e-7
    assert np.abs(np.delete(read, 17) - 1).max() <= 1 / 16
    row[0, 17] = 1e6  # now 1 is less than the smallest normal number of the row
    read = to_float32(quantized(row)[:, None], "fp8_e4m3")[0, 0]
    assert np.abs(np.delete(read, 17) - 1).max() <= 1e6 / 448 * 2.0**-10


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_read_as_such_and_leaves_the_others_alone(value):
    rows = np.ones((3, 16), np.float32)
    rows[1, 4] = value
    read = to_float32(quantized(rows)[:, None], "fp8_e4m3")[:, 0]
    assert np.isnan(read[1]).all()
    assert (read[[0, 2]] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_picked_out_of_the_stream_in_any_compute_dtype(dtype):
    stream = torch.randn(9, 16).to(dtype)
    kind, width = storage("fp8_e4m3", 16)
    arena = torch.zeros(4, 3, width, dtype=kind)
    index = torch.tensor([8, 0, 3, 3])
    put(arena[:, 1], stream, index)
    for place, source in zip(arena[:, 1].numpy(), stream[index].float().numpy(), strict=True):
        assert place[:16].tolist() == oracle(source)[0].tolist()
    assert not arena[:, [0, 2]].any()
    plain = torch.zeros(4, 16, dtype=dtype)
    put(plain, stream, index)
    assert torch.equal(plain, stream[index])


def test_widths_that_would_not_be_aligned_are_refused():
    with pytest.raises(OptionError, match="multiples of 8, the model's is 12"):
        slot_bytes("fp8_e4m3", 12)


SCRIPT = """
import sys
import numpy as np, torch
from layertap.engines.fp8 import quantize
from layertap.engines.fp8_kernel import quantize_rows
device = sys.argv[1]
rng = np.random.default_rng(0)
for hidden in (8, 72, 576):
    rows = (rng.standard_normal((20, hidden)) * 10.0 ** rng.integers(-45, 38, (20, 1))).astype(np.float32)
    rows[:8] = rng.integers(0, 2**32, (8, hidden), dtype=np.uint32).view(np.float32)  # any bits
    rows[8:10] = rng.choice(np.float32([0.0, -0.0, 1.0, 1.0625, 1.1875, 448, 17.5, -300, 2.0**-9, 3 * 2.0**-10]), (2, hidden))
    rows[10], rows[11], rows[12, 3], rows[13, 0] = 0, -0.0, np.inf, np.nan
    rows[14] = 3.4028235e38
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stream = torch.from_numpy(rows).to(dtype).to(device)
        index = torch.from_numpy(rng.permutation(20)).to(device)
        for picked in (None, index):
            found = torch.full((20, 2, hidden + 8), 0xAA, dtype=torch.uint8, device=device)
            expected = found.clone()
            quantize_rows(stream, picked, found[:, 1])
            quantize(stream if picked is None else stream[picked], expected[:, 1])
            assert torch.equal(found, expected), (hidden, dtype, (found != expected).nonzero()[:5])
            reference = torch.full((20, hidden + 8), 0xAA, dtype=torch.uint8)
            quantize((stream if picked is None else stream[picked]).cpu(), reference)
            assert torch.equal(found[:, 1].cpu(), reference), (hidden, dtype)
quantize_rows(torch.zeros(3, 8, device=device), None, torch.zeros(0, 16, dtype=torch.uint8, device=device))
print("equal")
"""


def test_the_kernel_gives_the_same_bytes_as_torch(assert_equal):
    assert_equal(SCRIPT)
