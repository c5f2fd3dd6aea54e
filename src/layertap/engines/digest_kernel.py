"""The Triton kernel of `digests`; imported only where a CUDA device needs it."""

# No annotations on the kernel's arguments but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS_A_PROGRAM = 8


@triton.jit
def _accumulate(  # noqa: ANN202
    words, seeds, secret, first, out, num_rows, row_words, exponents, lowest, signs,  # noqa: ANN001
    STRIPES: tl.constexpr, SLOT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes = tl.arange(0, 8)
    mask = (rows < num_rows)[:, None] & (lanes < 8)[None, :]
    seed = tl.load(seeds + rows, mask=rows < num_rows, other=0)[:, None]
    base = words + rows[:, None] * row_words
    acc = tl.load(first + lanes)[None, :] + tl.zeros((ROWS, 8), tl.int64)
    # even words of the secret get the seed added, odd ones subtracted
    lane_sign = 1 - 2 * (lanes % 2)[None, :]
    scramble = tl.load(secret + 16 + lanes)[None, :] + seed * lane_sign
    carried = tl.zeros((ROWS, 8), tl.int64)
    for stripe in range(STRIPES):
        n = stripe % 16
        key = tl.load(secret + n + lanes)[None, :] + seed * lane_sign * (1 - 2 * (n % 2))
        value = tl.load(base + stripe * 8 + lanes[None, :], mask=mask, other=0)
        crossed = tl.load(base + stripe * 8 + (lanes ^ 1)[None, :], mask=mask, other=0)
        mixed = value ^ key
        acc += crossed + (mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF)
        # all ones in a value's exponent, which is infinity or NaN, carry into the place of its sign
        looked = (value & exponents) + lowest
        if SLOT:
            looked = tl.where(((stripe * 8 + lanes) % SLOT == SLOT - 1)[None, :], 0, looked)
        carried |= looked
        if n == 15:
            acc ^= (acc >> 47) & 0x1FFFF
            acc ^= scramble
            acc *= 0x9E3779B1
    # the last stripe is that of the last 64 bytes; its key starts one byte into word 15 of the secret
    end = base + row_words - 8
    low = tl.load(secret + 15 + lanes)[None, :] - seed * lane_sign
    high = tl.load(secret + 16 + lanes)[None, :] + seed * lane_sign
    key = ((low >> 8) & 0xFFFFFFFFFFFFFF) | (high << 56)
    value = tl.load(end + lanes[None, :], mask=mask, other=0)
    crossed = tl.load(end + (lanes ^ 1)[None, :], mask=mask, other=0)
    mixed = value ^ key
    acc += crossed + (mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF)
    looked = (value & exponents) + lowest
    if SLOT:
        looked = tl.where(((row_words - 8 + lanes) % SLOT == SLOT - 1)[None, :], 0, looked)
    carried |= looked
    broken = tl.max(((carried & signs) != 0).to(tl.int64), axis=1)
    tl.store(out + rows[:, None] * 9 + lanes[None, :], acc, mask=mask)
    tl.store(out + rows * 9 + 8, broken, mask=rows < num_rows)


def accumulate(
    words: Any, seeds: Any, secret: Any, first: Any, masks: tuple[int, int, int], slot_words: int, out: Any
) -> None:
    """Fill `out` int64 [n, 9] for `words` int64 [n, words of a row].

    Args:
        words: the rows.
        seeds: int64 [n].
        secret: of XXH3.
        first: of XXH3.
        masks: of a word of values: the bits of their exponents, the lowest of each, the bits of their signs.
        slot_words: words of a slot whose last holds no values, which is so with fp8; otherwise 0.
        out: eight accumulators, and whether a value's exponent is all ones.
    """
    num_rows, row_words = words.shape
    if not num_rows:
        return
    grid = (triton.cdiv(num_rows, _ROWS_A_PROGRAM),)
    with torch.cuda.device_of(out):  # a kernel goes to the current one
        _accumulate[grid](
            words,
            seeds,
            secret,
            first,
            out,
            num_rows,
            row_words,
            *masks,
            STRIPES=(row_words - 1) // 8,
            SLOT=slot_words,
            ROWS=_ROWS_A_PROGRAM,
            num_warps=2,
        )
