"""layertap: hidden states out of LLM inference, any layers of any model, never wrong in silence.

The public names load on first use, so that importing layertap costs nothing and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from layertap.errors import *  # noqa: F403 - the whole tree is public
from layertap.errors import __all__ as _error_names

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "layertap.llm",
    "KVTransferConfig": "layertap.params",
    "LLM": "layertap.llm",
    "SamplingParams": "layertap.params",
    "cleanup_hidden_states": "layertap.files.read",
    "load_hidden_states": "layertap.files.read",
    "open_dataset": "layertap.datasets.reader",
}

if TYPE_CHECKING:
    from layertap.datasets.reader import open_dataset
    from layertap.files.read import cleanup_hidden_states, load_hidden_states
    from layertap.llm import LLM, AsyncLLM
    from layertap.params import KVTransferConfig, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "KVTransferConfig",
    "SamplingParams",
    "__version__",
    "cleanup_hidden_states",
    "load_hidden_states",
    "open_dataset",
    *_error_names,
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'layertap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
