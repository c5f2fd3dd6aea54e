"""The tap's Triton kernel: one launch a layer, one program a row.

Capture-safe: the grid comes from shapes, nothing is read back, and a row that isn't captured costs one load. The addresses of the
arena and its stamps, and the step's number, are read from the control tensor, so the arena may be allocated (or moved) after a
CUDA graph was captured.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tap"])  # type: ignore[untyped-decorator]
def _tap_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    hidden,  # noqa: ANN001
    residual,  # noqa: ANN001
    destinations,  # noqa: ANN001
    plans,  # noqa: ANN001
    table,  # noqa: ANN001
    control,  # noqa: ANN001
    hidden_stride,  # noqa: ANN001
    residual_stride,  # noqa: ANN001
    tap,  # noqa: ANN001
    num_taps: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    destination = tl.load(destinations + row).to(tl.int64)
    if destination >= 0:
        plan = tl.load(plans + row).to(tl.int64)
        rank = tl.load(table + plan * num_taps + tap).to(tl.int64)
        if rank >= 0:
            arena = tl.load(control).to(tl.pointer_type(hidden.dtype.element_ty))
            target = arena + (destination + rank) * width
            for begin in range(0, width, block):
                columns = begin + tl.arange(0, block)
                inside = columns < width
                value = tl.load(hidden + row * hidden_stride + columns, mask=inside)
                if has_residual:
                    other = tl.load(residual + row * residual_stride + columns, mask=inside)
                    value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
                tl.store(target + columns, value, mask=inside)
            stamps = tl.load(control + 2).to(tl.pointer_type(tl.int32))
            tl.store(stamps + destination + rank, tl.load(control + 1).to(tl.int32))


def tap_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    destinations: torch.Tensor,
    plans: torch.Tensor,
    table: torch.Tensor,
    control: torch.Tensor,
    tap: int,
) -> None:
    """Launch the kernel for `hidden` [rows, width] (+ `residual`)."""
    num_rows = min(hidden.shape[0], destinations.shape[0])
    if num_rows == 0:
        return
    width = hidden.shape[1]
    kernel: Any = _tap_kernel
    kernel[(num_rows,)](
        hidden,
        hidden if residual is None else residual,
        destinations,
        plans,
        table,
        control,
        hidden.stride(0),
        hidden.stride(0) if residual is None else residual.stride(0),
        tap,
        table.shape[1],
        width,
        min(triton.next_power_of_2(width), 4096),
        residual is not None,
        num_warps=8 if width >= 2048 else 4,
    )
