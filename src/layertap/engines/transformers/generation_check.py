"""The spot check of generation: rows of a finished sequence are computed again by one plain forward over its final tokens.

The forward runs alone, without a cache, through the tap of extraction, which shares no code with that of generation. It runs on the
generation loop's thread, before the caller hears of the end, so that no exchange of the weights can come between; its rows are
compared by the writer, with those that were stored, before they are published.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layertap.capture.request import CaptureSpec
from layertap.engines.fp8 import storage
from layertap.engines.transformers.paged import PAGED
from layertap.engines.transformers.passes import Passes, length_limit
from layertap.engines.transformers.spot_check import SpotCheck
from layertap.engines.transformers.trial import Verdict
from layertap.engines.transformers.weights import Layout
from layertap.errors import LayertapError
from layertap.writing.checks import FinalCheck

__all__ = ["GenerationCheck"]

logger = logging.getLogger(__name__)

_MOST_ROWS = 2048


class GenerationCheck:
    """Which sequences are computed again, and how. For the loop's thread.

    Args:
        spot_check: how often, and what came of it.
        model: the complete model.
        verdict: how it generates.
    """

    def __init__(self, spot_check: SpotCheck, model: nn.Module, verdict: Verdict) -> None:
        self._spot_check = spot_check
        self._model = model
        self._verdict = verdict
        self._passes: Passes | None = None
        self._longest = length_limit(model)
        self._possible = verdict.causal and not any(hasattr(module, "_hf_hook") for module in model.modules())

    def of(self, spec: CaptureSpec, token_ids: Sequence[int]) -> FinalCheck | None:
        """What has to be asked before the rows of this sequence are published; None if it isn't its turn, or can't be told.

        Rows can't be told where they depend on later tokens, or where a rotary table changed on the way (`length_limit`).
        """
        if not self._possible or (self._longest is not None and len(token_ids) > self._longest):
            return None
        try:
            owed = spec.window.owed(spec.prompt_len, len(token_ids))
        except LayertapError:  # said by whoever publishes it
            return None
        if not owed or not self._spot_check.due():
            return None
        first = owed.start + random.randint(0, max(0, len(owed) - _MOST_ROWS))
        positions = range(first, min(owed.stop, first + _MOST_ROWS))
        try:
            again = self._compute(spec, token_ids[: positions.stop], positions)
        except torch.OutOfMemoryError:  # beside what is running there may be no room; the next one in turn is checked
            return None
        return FinalCheck(positions, self._comparison(spec, again, positions.start))

    def _compute(self, spec: CaptureSpec, token_ids: Sequence[int], positions: range) -> Tensor:
        if self._passes is None:
            own = getattr(self._model.config, "_attn_implementation", None)
            attention = None if self._verdict.attention in (own, PAGED) else self._verdict.attention
            self._passes = Passes(self._model, Layout(self._model), attention)
        dtype, width = storage(spec.dtype, spec.hidden_size)
        rows = torch.empty((len(positions), len(spec.layers), width), dtype=dtype, device=self._passes.device)
        self._passes.run("alone", [list(token_ids)], [positions], spec.layers, rows)
        return rows.cpu()

    def _comparison(
        self, spec: CaptureSpec, again: Tensor, first_position: int
    ) -> Callable[[NDArray[np.uint8]], str | None]:
        compute_dtype = next(self._model.parameters()).dtype

        def compare(stored: NDArray[np.uint8]) -> str | None:
            rows = torch.from_numpy(stored).view(again.dtype)
            trouble = self._spot_check.compare(rows, again, spec.layers, compute_dtype, first_position)
            if trouble is not None:
                logger.error("a generated sequence: %s", trouble)
            return trouble

        return compare
