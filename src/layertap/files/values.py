"""From raw rows to numbers: NumPy arrays and torch tensors of what a file holds.

A slot of fp8 rows is the values (float8_e4m3fn), their scale (float32, little-endian) and four zeros; a value stands for itself
times the scale. Tensors are views of the raw rows, also of fp8: nothing is copied until another dtype is asked for.
"""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from layertap.capture.request import FP8, FP8_TAIL_BYTES, SAVE_DTYPES
from layertap.errors import OptionError

if TYPE_CHECKING:
    import torch

Floats: TypeAlias = NDArray[np.float32]
READ_DTYPES = tuple(name for name in SAVE_DTYPES if name != FP8)
"""What rows can be read as."""


def check_read_dtype(dtype: str | None) -> None:
    """Refuse what rows can't be read as.

    Raises:
        OptionError: says what they can.
    """
    if dtype is not None and dtype not in READ_DTYPES:
        raise OptionError(
            f"dtype: {dtype!r} is none of {', '.join(READ_DTYPES)}; without it, rows come as they are saved"
        )


def to_tensors(rows: NDArray[np.uint8], saved: str, dtype: str | None = None) -> "dict[str, torch.Tensor]":
    """Turn raw rows into tensors.

    Args:
        rows: uint8 [tokens, layers, bytes of a slot], C-contiguous.
        saved: their dtype, a key of SAVE_DTYPES.
        dtype: convert to this one; None: as they are.

    Returns:
        `hidden_states` [tokens, layers, hidden], and for fp8 rows that aren't converted `hidden_states_scale` [tokens, layers].

    Raises:
        OptionError: a value is too large for the dtype.
    """
    import torch

    raw = torch.from_numpy(rows)
    if saved != FP8:
        values = raw.view(getattr(torch, saved))
        return {"hidden_states": values if dtype is None else _converted(values, dtype)}
    hidden_size = rows.shape[2] - FP8_TAIL_BYTES
    values = raw[:, :, :hidden_size].view(torch.float8_e4m3fn)
    scale = raw[:, :, hidden_size : hidden_size + 4].view(torch.float32)[:, :, 0]
    if dtype is None:
        return {"hidden_states": values, "hidden_states_scale": scale}
    return {"hidden_states": _converted(values.float() * scale[:, :, None], dtype)}


def _converted(values: "torch.Tensor", dtype: str) -> "torch.Tensor":
    import torch

    found = values.to(getattr(torch, dtype))
    if not bool(torch.isfinite(found).all()) and bool((torch.isfinite(values) & ~torch.isfinite(found)).any()):
        largest = float(values[torch.isfinite(values)].abs().max())
        raise OptionError(
            f"dtype: {dtype} ends at {torch.finfo(found.dtype).max:g}, and these rows hold values of up to {largest:g}; "
            "read them as float32" + (" or bfloat16" if dtype == "float16" else "")
        )
    return found


def to_float32(rows: NDArray[np.uint8], dtype: str) -> Floats:
    """Turn raw rows [tokens, layers, bytes of a slot] into numbers, without torch."""
    flat = np.ascontiguousarray(rows)
    if dtype == FP8:
        scale = flat[:, :, -FP8_TAIL_BYTES:-4].copy().view("<f4")
        scaled: Floats = _E4M3[flat[:, :, :-FP8_TAIL_BYTES]] * scale
        return scaled
    if dtype == "bfloat16":  # NumPy has none: it is the upper half of a float32
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return flat.view("<f4" if dtype == "float32" else "<f2").astype(np.float32)


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    sizes[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


_E4M3 = _e4m3_values()
