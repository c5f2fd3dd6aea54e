"""Data sets of hidden states: conversations in, shards out, resumed by checksum, read by memory map."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layertap.datasets.streaming import stream

__all__ = ["stream"]


def __getattr__(name: str) -> Any:
    # on first use: it needs torch
    if name == "stream":
        from layertap.datasets.streaming import stream

        return stream
    raise AttributeError(f"module 'layertap.datasets' has no attribute {name!r}")
