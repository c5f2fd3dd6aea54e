"""Rows in fp8: quantized where they are computed, so that half the bytes leave the device.

Each row of a layer has a scale of its own: s = max(largest absolute value / 448, 2^-126), and a value v is saved as v / s
rounded to float8_e4m3fn, ties to even; both divisions are float32's. 448 is the largest number of the format, so a massive
activation is saved exactly and sets the resolution of its row. Rows of zeros have scale 0 and values 0; rows with a NaN or
infinity have scale NaN and values NaN, which the checks of rows refuse.

On CUDA one Triton kernel does it (`fp8_kernel`); elsewhere, and where Triton can't build it, torch's own operators, which the
kernel equals bit for bit.
"""

from typing import TYPE_CHECKING

import torch

from layertap.capture.request import FP8, FP8_TAIL_BYTES, slot_bytes
from layertap.engines.digests import kernels_run

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dequantize", "is_quantized", "put", "quantize", "storage"]

_LARGEST = 448.0
_LEAST_SCALE = 2.0**-126
_NAN_CODE = 0x7F


def storage(dtype: str, hidden_size: int) -> tuple[torch.dtype, int]:
    """Dtype and width of the tensor [rows, layers, width] in which an engine keeps rows of a saved dtype."""
    return (torch.uint8, slot_bytes(FP8, hidden_size)) if dtype == FP8 else (getattr(torch, dtype), hidden_size)


def is_quantized(rows: "Tensor") -> bool:
    """Whether a tensor that `storage` describes holds fp8 slots."""
    return rows.dtype == torch.uint8


def put(place: "Tensor", stream: "Tensor", index: "Tensor | None" = None) -> None:
    """Copy rows of the stream to their place, in the dtype that is saved.

    Args:
        place: [n, width] on the stream's device, its last axis contiguous.
        stream: [tokens, hidden]; without `index` as many rows as `place`.
        index: int64 [n], which rows of the stream.
    """
    if not is_quantized(place):
        place.copy_(stream if index is None else stream[index])
    elif place.is_cuda and kernels_run(place.device):
        from layertap.engines.fp8_kernel import quantize_rows

        quantize_rows(stream, index, place)
    else:
        quantize(stream if index is None else stream[index], place)


def quantize(values: "Tensor", place: "Tensor") -> None:
    """Quantize rows [n, hidden] into fp8 slots uint8 [n, hidden + 8]."""
    values = values.float()
    hidden_size = values.shape[-1]
    largest = values.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    # one division beside the kernel's: a product with 1/448 would round differently
    scale = (largest / torch.full_like(largest, _LARGEST)).clamp_min(_LEAST_SCALE)
    codes = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(finite, codes, _NAN_CODE).masked_fill_(largest == 0, 0)
    scale = torch.where(finite, scale, torch.nan).masked_fill_(largest == 0, 0.0)
    place[:, :hidden_size] = codes
    place[:, hidden_size : hidden_size + 4] = scale.view(torch.uint8)
    place[:, hidden_size + 4 :] = 0


def dequantize(slots: "Tensor") -> "Tensor":
    """Numbers float32 [..., hidden] of fp8 slots uint8 [..., hidden + 8]."""
    hidden_size = slots.shape[-1] - FP8_TAIL_BYTES
    scale = slots[..., hidden_size : hidden_size + 4].contiguous().view(torch.float32)
    return slots[..., :hidden_size].view(torch.float8_e4m3fn).float() * scale
