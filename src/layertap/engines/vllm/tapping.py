"""The op in a block: behind it, or in front of it."""

from typing import Any

import torch

from layertap.engines.vllm.residual import Rule

__all__ = ["Entries", "tap_input", "tap_output"]

Entries = tuple[int | str, int | str | None]
"""Where hidden states and residual stand among the arguments of a block."""


def tap_output(block: Any, column: int, rule: Rule) -> None:
    """What the block puts out goes to a column of the table; the block has the tap's buffers."""
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        hidden, residual = output, None
        if isinstance(output, tuple):
            hidden = output[0]
            if rule == "sum":
                residual = output[1]
        torch.ops.layertap.tap(
            hidden,
            residual,
            block.layertap_destinations,
            block.layertap_plans,
            block.layertap_table,
            block.layertap_control,
            column,
        )
        return output

    block.forward = forward


def tap_input(block: Any, column: int, hidden: int | str, residual: int | str | None) -> None:
    """The same for what enters it."""
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        torch.ops.layertap.tap(
            args[hidden] if isinstance(hidden, int) else kwargs[hidden],
            None if residual is None else args[residual] if isinstance(residual, int) else kwargs[residual],
            block.layertap_destinations,
            block.layertap_plans,
            block.layertap_table,
            block.layertap_control,
            column,
        )
        return original(*args, **kwargs)

    block.forward = forward
