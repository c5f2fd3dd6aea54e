"""Rows from plain transformers, to compare files with: float32, one sequence at a time, nothing of our engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from layertap.capture.request import FP8
from layertap.errors import LayertapError, ModelError, UnsupportedModelError
from layertap.files.values import Floats

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-2}
"""Largest relative error of a row, by the coarser of compute and saved dtype."""
FP8_TOLERANCE = 6.25e-2
"""What rounding to three bits of mantissa may add to that."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the rows of one sample are from the recomputed ones."""

    errors: Floats
    """[tokens, layers]: length of the difference over length of the recomputed row."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """True if every row is within the tolerance."""
        return bool((self.errors <= self.tolerance).all())

    @property
    def worst(self) -> tuple[int, int]:
        """Token and slot of the largest error."""
        token, slot = divmod(int(np.nan_to_num(self.errors, nan=np.inf).argmax()), self.errors.shape[1])
        return token, slot


class Reference:
    """A model of plain transformers in float32.

    Args:
        model: folder, hub id or GGUF file.
        revision: of the hub.
        trust_remote_code: code of the checkpoint may run.
        device: where it runs.

    Raises:
        ModelError: it can't be loaded.
    """

    def __init__(
        self, model: str, *, revision: str | None = None, trust_remote_code: bool = False, device: str = "cpu"
    ) -> None:
        from transformers import AutoModelForCausalLM

        path = Path(model)
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        if path.is_file():
            from transformers import GgufConfig

            model = str(path.parent)
            options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        elif revision is not None:
            options["revision"] = revision
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(model, **options).to(device).eval()
        except LayertapError:
            raise
        except Exception as exc:  # transformers raises what it likes
            hub = (
                ""
                if path.exists()
                else " (there is no such folder here, so it was taken for a hub id; --model names it)"
            )
            raise ModelError(f"{model}: plain transformers can't load it for the comparison{hub}: {exc}") from exc
        self._num_layers = int(self._model.config.get_text_config(decoder=True).num_hidden_layers)
        self._last_block = self._find_last_block()
        self._device = device

    def rows(self, token_ids: Sequence[int] | NDArray[np.int64], layers: Sequence[int]) -> Floats:
        """Compute [tokens, layers, hidden] of one sequence."""
        last: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: object, output: Any) -> None:
            last.append(output if isinstance(output, torch.Tensor) else output[0])

        ids = torch.tensor([[int(token) for token in token_ids]], device=self._device)
        hook = self._last_block.register_forward_hook(keep)
        try:
            with torch.inference_mode():
                streams = self._model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        finally:
            hook.remove()
        # the last entry of transformers is behind the final norm
        picked = [last[-1] if layer == self._num_layers else streams[layer] for layer in layers]
        rows: Floats = torch.stack([stream[0] for stream in picked], dim=1).float().cpu().numpy()
        return rows

    def logits(self, token_ids: Sequence[int], last_rows: Floats | None = None) -> Floats:
        """Compute logits [tokens, vocabulary]; `last_rows` [tokens, hidden] take the place of what the last block puts out."""

        def replace(_module: nn.Module, _args: object, output: Any) -> Any:
            rows = torch.from_numpy(last_rows).to(self._device)[None]
            return rows if isinstance(output, torch.Tensor) else (rows, *output[1:])

        ids = torch.tensor([[int(token) for token in token_ids]], device=self._device)
        hook = None if last_rows is None else self._last_block.register_forward_hook(replace)
        try:
            with torch.inference_mode():
                found: Floats = self._model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        finally:
            if hook is not None:
                hook.remove()
        return found

    def _find_last_block(self) -> nn.Module:
        lists = [
            part for part in self._model.modules() if isinstance(part, nn.ModuleList) and len(part) == self._num_layers
        ]
        if len(lists) != 1:
            raise UnsupportedModelError(
                f"the comparison needs the model's list of {self._num_layers} blocks, and found {len(lists)} such lists"
            )
        return lists[0][-1]


def compare(rows: Floats, reference: Floats, *, save_dtype: str, compute_dtype: str) -> Comparison:
    """Compare saved rows with recomputed ones."""
    lengths = np.maximum(np.linalg.norm(reference, axis=-1), np.finfo(np.float32).tiny)
    errors: Floats = np.linalg.norm(rows - reference, axis=-1) / lengths
    computed = TOLERANCES.get(compute_dtype, max(TOLERANCES.values()))
    if save_dtype == FP8:
        return Comparison(errors, FP8_TOLERANCE + computed)
    return Comparison(errors, max(TOLERANCES[save_dtype], computed))
