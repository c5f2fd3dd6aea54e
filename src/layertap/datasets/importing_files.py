"""One file that others wrote -> the rows of one sample, checked as far as the file allows it.

Files of layertap carry digests, which are compared. Those of vLLM's `ExampleHiddenStatesConnector` and of speculators don't: what
is checked there is that the file is whole, that its shapes and dtypes are those of hidden states, and that rows and tokens agree.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layertap.capture.spans import Spans
from layertap.errors import CorruptError, ForeignError, TornError, WaitTimeoutError
from layertap.files.format import FileInfo
from layertap.files.locks import is_held, lock_path
from layertap.files.read import read_file

if TYPE_CHECKING:
    import torch

UNKNOWN = "unknown"
UNKNOWN_PROMPT = -1
_SAFETENSORS_LIMIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The content of one file."""

    rows: NDArray[np.uint8]
    """[tokens, bytes of a row]"""
    token_ids: NDArray[np.int64]
    dtype: str
    num_slots: int
    hidden_size: int
    info: FileInfo | None = None
    """What the file says of itself, if it does."""
    loss_mask: Spans | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def first_position(self) -> int:
        """Position of the first row; files that don't say begin at 0."""
        return 0 if self.info is None else self.info.first_position

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, or -1: the file doesn't say."""
        return UNKNOWN_PROMPT if self.info is None else self.info.prompt_len


def read_layertap(path: Path) -> Imported:
    """Read a file of layertap and compare every digest.

    Raises:
        HiddenStatesError: there is none, it is damaged or foreign, it is still being written, or its writer failed.
    """
    loaded = read_file(path, timeout=0.0)
    info = loaded.info
    if int(info.facts.get("samples", "1")) != 1:
        raise ForeignError(
            f"{path}: a shard of {info.facts['samples']} samples of a data set, not a file of one request"
        )
    if not info.num_rows:
        raise ForeignError(f"{path}: no rows")
    return Imported(
        rows=loaded.rows.reshape(info.num_rows, -1),
        token_ids=loaded.token_ids,
        dtype=info.dtype,
        num_slots=len(info.layers),
        hidden_size=info.hidden_size,
        info=info,
        facts=info.facts,
    )


def is_layertap(path: Path) -> bool:
    """True if a safetensors file says that it is of layertap, without a look at its digests."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return "layertap_format" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False  # what is wrong is said when it is read


def read_vllm(path: Path) -> Imported:
    """Read a file with `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens], which says nothing else.

    Raises:
        HiddenStatesError: it isn't there, torn, foreign, or still being written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if is_held(lock_path(path)):
        raise WaitTimeoutError(f"{path}: still being written: its writer holds the lock beside it")
    if not path.exists():
        raise TornError(f"{path}: there is a lock of its writer, which is gone, and no file")
    if is_layertap(path):
        raise ForeignError(
            f"{path}: a file of layertap, whose checksums must not be left unread: import it from 'files'"
        )
    try:
        if path.stat().st_size < _SAFETENSORS_LIMIT:
            raise TornError(f"{path}: {path.stat().st_size} bytes, which is no whole file")
        tensors = load_file(path)
    except SafetensorError as exc:
        raise TornError(f"{path}: no whole safetensors file ({exc})") from exc
    if set(tensors) != {"hidden_states", "token_ids"}:
        raise ForeignError(f"{path}: holds {sorted(tensors)}, expected hidden_states and token_ids")
    return from_tensors(tensors["hidden_states"], tensors["token_ids"], str(path))


def read_speculators_pt(path: Path) -> Imported:
    """Read a sample as `torch.save` wrote it: `input_ids`, `hidden_states` (a tensor a layer, or one of all), `loss_mask`.

    Raises:
        HiddenStatesError: it is torn or foreign. No code of the file is run.
    """
    import torch

    try:
        record: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as exc:
        raise TornError(f"{path}: can't be loaded as tensors ({str(exc).splitlines()[0]})") from exc
    if not isinstance(record, dict) or not {"input_ids", "hidden_states"} <= record.keys():
        raise ForeignError(f"{path}: expected a dict with input_ids and hidden_states")
    states, token_ids, mask = record["hidden_states"], record["input_ids"], record.get("loss_mask")
    if isinstance(states, list | tuple):
        if not states or any(not isinstance(one, torch.Tensor) or one.shape != states[0].shape for one in states):
            raise ForeignError(f"{path}: hidden_states: expected tensors of one shape, one a layer")
        states = torch.stack(list(states), dim=-2)
    if not isinstance(states, torch.Tensor) or not isinstance(token_ids, torch.Tensor):
        raise ForeignError(f"{path}: hidden_states and input_ids: expected tensors")
    found = from_tensors(states, token_ids, str(path))
    if mask is None:
        return found
    if not isinstance(mask, torch.Tensor):
        raise ForeignError(f"{path}: loss_mask: expected a tensor")
    return with_mask(found, mask.numpy(), str(path))


def from_tensors(states: "torch.Tensor", token_ids: "torch.Tensor", name: str) -> Imported:
    """Check that two tensors are states and their tokens.

    Raises:
        ForeignError: shape or dtype are others.
        CorruptError: rows and tokens don't agree.
    """
    import torch

    dtype = str(states.dtype).removeprefix("torch.")
    if states.ndim != 3 or dtype not in ("float32", "bfloat16", "float16"):
        raise ForeignError(
            f"{name}: hidden_states is {dtype} {list(states.shape)}, expected floats [tokens, layers, hidden]"
        )
    if token_ids.ndim != 1 or token_ids.dtype not in (torch.int64, torch.int32):
        raise ForeignError(
            f"{name}: token ids are {token_ids.dtype} {list(token_ids.shape)}, expected integers [tokens]"
        )
    tokens, num_slots, hidden_size = states.shape
    if len(token_ids) != tokens:
        raise CorruptError(f"{name}: {tokens} rows of {len(token_ids)} tokens")
    if not states.numel():
        raise ForeignError(f"{name}: no rows")
    ids = token_ids.to(torch.int64).numpy()
    if (ids < 0).any():
        raise CorruptError(f"{name}: negative token ids")
    rows = states.contiguous().view(torch.uint8).reshape(tokens, -1).numpy()
    return Imported(rows=rows, token_ids=ids, dtype=dtype, num_slots=num_slots, hidden_size=hidden_size)


def with_mask(found: Imported, mask: NDArray[Any], name: str) -> Imported:
    """Give a sample its mask, a 0 or 1 a token.

    Raises:
        CorruptError: it has another length, or other values.
    """
    if mask.shape != found.token_ids.shape or not np.isin(mask, (0, 1)).all():
        raise CorruptError(f"{name}: the loss mask isn't a 0 or 1 for each of {len(found.token_ids)} tokens")
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    spans = tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))
    return replace(found, loss_mask=spans)
