"""The final norm of a model, for formats that want the last hidden state behind it. Read without any block."""

from pathlib import Path
from typing import TYPE_CHECKING

from layertap.datasets.manifest import RowIdentity
from layertap.errors import OptionError, UnsupportedModelError

if TYPE_CHECKING:
    import torch


class FinalNorm:
    """Applies a model's own final norm to rows of its last layer.

    Args:
        model: folder, hub id or GGUF file.
        rows: what the rows are; the model has to be that which they came from, by its sizes and, where both are known, by
            its files.

    Raises:
        ModelError: the model can't be read.
        OptionError: it is another model than that of the rows.
        UnsupportedModelError: it has no single norm behind its blocks.
    """

    def __init__(self, model: str, rows: RowIdentity) -> None:
        import torch

        from layertap.capture.residual import is_norm
        from layertap.datasets.fingerprint import model_fingerprint
        from layertap.engines.transformers.load import open_model
        from layertap.engines.transformers.weights import Weights

        dtype = rows.save_dtype if rows.save_dtype in ("float32", "float16", "bfloat16") else rows.compute_dtype
        weights = Weights(open_model(model, dtype=dtype, device="cpu", revision=rows.revision))
        found = weights.layout
        here = model_fingerprint(model, rows.revision)
        other_files = None not in (here, rows.model_fingerprint) and here != rows.model_fingerprint
        if other_files or (found.hidden_size, weights.num_layers) != (rows.hidden_size, rows.num_layers):
            raise OptionError(
                f"model: {model} ({weights.num_layers} blocks of {found.hidden_size}) isn't the model of the data set, "
                f"{rows.model} ({rows.num_layers} blocks of {rows.hidden_size}), or its files have changed"
            )
        decoder = weights.at_least(0).get_submodule(found.found.decoder_path)
        children = list(decoder.named_children())
        container = found.path.removeprefix(found.found.decoder_path).lstrip(".").partition(".")[0]
        behind = [name for name, _ in children].index(container) + 1
        norms = [(name, child) for name, child in children[behind:] if is_norm(child)]
        if len(norms) != 1 or found.residual_of(weights.at_least(0)).kind != "single":
            raise UnsupportedModelError(
                f"{Path(model).name}: expected one norm behind the blocks, found {[name for name, _ in norms] or 'none'}; "
                "its last hidden state can't be told from the saved rows"
            )
        self._norm = norms[0][1].to(getattr(torch, dtype))

    def __call__(self, states: "torch.Tensor") -> "torch.Tensor":
        """Norm states [tokens, hidden]; returns the same shape and dtype."""
        import torch

        with torch.no_grad():
            # some norms take their dtype from the batch's shape of three axes
            normed: torch.Tensor = self._norm(states[None])[0]
        return normed.to(states.dtype)
