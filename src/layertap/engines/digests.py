"""Row digests on a CUDA device: XXH3-64 of every row, before the rows leave for the host.

On the host one thread hashes a row of 32 KiB in some microseconds, under Python's lock; at 300,000 rows a second that is the
bottleneck of the whole corridor. On the device it is one pass over memory (1.3 to 1.5 TB/s on an H200), and the digest also
covers the copy to the host.

The algorithm is the long-input branch (more than 240 bytes) of XXH3 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md):
stripes of 64 bytes go into eight accumulators, sixteen stripes to a block. The kernel does the stripes; merging the eight
accumulators of each row is cheap and done with NumPy.
"""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layertap.capture.request import EXPONENT_BITS, FP8, SAVE_DTYPES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LANES = 8
_WORD_BYTES = 8
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_AVALANCHE = np.uint64(0x165667919E3779F9)
_FIRST = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_WORDS = np.frombuffer(_SECRET, "<u8")


def can_digest(rows: "torch.Tensor") -> bool:
    """Whether rows [n, layers, width] on this device can be digested here; otherwise the writer does it."""
    slot_bytes = rows.shape[-1] * rows.element_size()
    row_bytes = rows.shape[1] * slot_bytes if rows.shape[0] else 0
    # whole words in each slot: the kernel leaves out the last one of a slot of fp8
    return rows.is_cuda and row_bytes > 240 and slot_bytes % _WORD_BYTES == 0 and kernels_run(rows.device)


@lru_cache(maxsize=16)
def kernels_run(device: "torch.device") -> bool:
    """Whether Triton's kernels can be built for this device: it takes a C compiler, which slim containers don't have."""
    import torch

    try:
        start_digests(
            torch.zeros(1, 1, 64, dtype=torch.float32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
    except Exception as exc:  # noqa: BLE001 - whatever it is, there are other ways
        logger.warning(
            "Triton's kernels can't be built (%s: %s): rows are hashed on the host, which is slower; is a C compiler installed?",
            type(exc).__name__,
            exc,
        )
        return False
    return True


def start_digests(rows: "torch.Tensor", token_ids: "torch.Tensor") -> "torch.Tensor":
    """Launch the kernel.

    Args:
        rows: [n, layers, hidden] on the device, contiguous.
        token_ids: int64 [n] on the device, the seeds.

    Returns:
        int64 [n, 9] on the device: the accumulators, for `finish_digests`, and 1 where a value of the row is infinite or NaN.
    """
    import torch

    from layertap.engines.digest_kernel import accumulate

    num_rows = rows.shape[0]
    words = rows.reshape(num_rows, -1).view(torch.int64)
    out = torch.empty(num_rows, _LANES + 1, dtype=torch.int64, device=rows.device)
    # slots of fp8 are bytes, and their last word is no value but the scale
    is_fp8 = rows.dtype == torch.uint8
    masks = _masks(FP8 if is_fp8 else str(rows.dtype).removeprefix("torch."))
    accumulate(words, token_ids, *_constants(rows.device), masks, rows.shape[-1] // 8 if is_fp8 else 0, out)
    return out


def _masks(dtype: str) -> tuple[int, int, int]:
    """Of a 64-bit word of values, as signed integers: the bits of their exponents, the lowest of each, the bits of their signs."""
    exponent, bits = EXPONENT_BITS[dtype], 8 * SAVE_DTYPES[dtype]
    every = sum(1 << shift for shift in range(0, 64, bits))
    signs = every << (bits - 1)
    return every * exponent, every * (exponent & -exponent), signs - (1 << 64)


@lru_cache(maxsize=16)
def _constants(device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    secret = torch.from_numpy(_WORDS.view(np.int64).copy())
    first = torch.from_numpy(np.array(_FIRST, np.uint64).view(np.int64))
    return secret.to(device), first.to(device)


def finish_digests(
    accumulators: NDArray[np.uint64], token_ids: NDArray[np.int64], row_bytes: int
) -> NDArray[np.uint64]:
    """Merge the accumulators of each row into its digest.

    Args:
        accumulators: uint64 [n, 8 or more columns].
        token_ids: int64 [n], the seeds.
        row_bytes: bytes of a row.

    Returns:
        uint64 [n], equal to `layertap.files.format.row_digests`.
    """
    seeds = token_ids.astype(np.uint64)[:, None]
    secret = np.empty((len(token_ids), len(_WORDS)), np.uint64)
    secret[:, 0::2], secret[:, 1::2] = _WORDS[0::2] + seeds, _WORDS[1::2] - seeds
    with np.errstate(over="ignore"):
        result = np.full(len(token_ids), (row_bytes * _PRIME64_1) % 2**64, np.uint64)
        for pair in range(4):
            left = accumulators[:, 2 * pair] ^ _unaligned(secret, 11 + 16 * pair)
            right = accumulators[:, 2 * pair + 1] ^ _unaligned(secret, 19 + 16 * pair)
            result += _multiply_fold(left, right)
        result ^= result >> np.uint64(37)
        result *= _AVALANCHE
        result ^= result >> np.uint64(32)
    return result


def _unaligned(secret: NDArray[np.uint64], offset: int) -> NDArray[np.uint64]:
    word, shift = offset // 8, np.uint64(8 * (offset % 8))
    return (secret[:, word] >> shift) | (secret[:, word + 1] << (np.uint64(64) - shift))


def _multiply_fold(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The two halves of the 128-bit product, xored."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low32, a >> shift, b & low32, b >> shift
    low_low, high_low, low_high, high_high = a_low * b_low, a_high * b_low, a_low * b_high, a_high * b_high
    cross = (low_low >> shift) + (high_low & low32) + low_high
    upper = (high_low >> shift) + (cross >> shift) + high_high
    lower = (cross << shift) | (low_low & low32)
    folded: NDArray[np.uint64] = np.bitwise_xor(upper, lower)
    return folded
