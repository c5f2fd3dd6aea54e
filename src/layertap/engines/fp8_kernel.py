"""The Triton kernel of `fp8`; imported only where a CUDA device needs it.

Rounding to float8 is done on the bits, so every device that Triton knows can do it and gets the same bytes.
"""

# No annotations on the kernel's arguments but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize(rows, index, place, width, stride, pitch, PICK: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row) if PICK else row
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    values = tl.load(rows + source * stride + columns, mask=mask, other=0)
    # bfloat16 comes as bits, which no conversion can flush to zero
    bits = values.to(tl.int32) << 16 if BF16 else values.to(tl.float32).to(tl.int32, bitcast=True)
    sizes = bits & 0x7FFFFFFF
    # as integers NaN and infinity are above all numbers
    largest = tl.max(sizes, 0)
    is_finite = largest < 0x7F800000
    is_zero = largest == 0
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    scale = tl.where(is_finite, tl.maximum(scale, 1.1754943508222875e-38), 1.0)
    scaled = tl.div_rn(sizes.to(tl.float32, bitcast=True), tl.zeros((BLOCK,), tl.float32) + scale)
    scaled_bits = scaled.to(tl.int32, bitcast=True)
    # three bits of mantissa stay, ties to even; the bias of the exponent goes from 127 to 7
    normal = ((scaled_bits + 0x7FFFF + ((scaled_bits >> 20) & 1)) >> 20) - 960
    # below 2^-6 values are multiples of 2^-9: adding 2^14 rounds to those
    small = (scaled + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(scaled < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    codes = tl.where(is_finite, tl.where(is_zero, 0, codes), 0x7F)
    target = place + row * pitch
    tl.store(target + columns, codes.to(tl.uint8), mask=mask)
    tail = tl.where(is_finite, tl.where(is_zero, 0, scale.to(tl.int32, bitcast=True)), 0x7FC00000)
    four = tl.arange(0, 8)
    tl.store(target + width + four, tl.where(four < 4, (tail >> (8 * (four & 3))) & 0xFF, 0).to(tl.uint8))


def quantize_rows(stream: Any, index: Any, place: Any) -> None:
    """Quantize rows of `stream` [tokens, hidden] (those of `index`, if any) into fp8 slots `place` uint8 [n, hidden + 8]."""
    num_rows, hidden = place.shape[0], stream.shape[1]
    if stream.stride(1) != 1:
        stream = stream.contiguous()
    is_bfloat16 = stream.dtype == torch.bfloat16
    if is_bfloat16:
        stream = stream.view(torch.int16)
    if not num_rows:
        return
    block = triton.next_power_of_2(hidden)
    with torch.cuda.device_of(place):  # a kernel goes to the current one
        _quantize[(num_rows,)](
            stream,
            stream if index is None else index,
            place,
            hidden,
            stream.stride(0),
            place.stride(0),
            PICK=index is not None,
            BF16=is_bfloat16,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
        )
