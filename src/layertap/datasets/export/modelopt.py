"""The dump that TensorRT Model-Optimizer trains draft models from offline: `offline_data_path=OUT`.

    OUT/<index>.pt    torch.save of a dict, a sample each

    input_ids              int64 [tokens]
    loss_mask              int64 [tokens], 0 or 1
    aux_hidden_states      [tokens, layers * hidden]: all layers but the last, one behind the other
    hidden_states          [tokens, hidden]: the last layer
    hidden_states_prenorm  whether `hidden_states` is before the final norm
    conversation_id        the sample's own id, or its index

Model-Optimizer applies the norm itself where `hidden_states_prenorm` is true. Releases that don't know the key (0.47 does)
take the states as normed: for them, give the model, whose norm is applied then.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from layertap.datasets.export import as_numbers, new_folder, refuse_undraftable, save_record
from layertap.datasets.export.norms import FinalNorm
from layertap.datasets.reader import Dataset
from layertap.errors import OptionError

if TYPE_CHECKING:
    import torch


def export_modelopt(
    dataset: Dataset, out: Path, model: str | None = None, on_sample: Callable[[int], None] = lambda _done: None
) -> int:
    """Write a data set as Model-Optimizer's dump.

    Args:
        dataset: with loss masks, and the model's last layer as the last of its layers.
        out: a new folder.
        model: the model of the rows; given, its final norm is applied to the last layer.
        on_sample: called with the number of samples that are done.

    Returns:
        How many samples were written.

    Raises:
        OptionError: the set lacks what the format needs, or the folder isn't empty.
        ModelError: the model can't be read.
        OSError: the disk's reason.
    """
    refuse_undraftable(dataset, "Model-Optimizer")
    norm = None if model is None else FinalNorm(model, dataset.manifest.rows)
    dataset = as_numbers(dataset)
    new_folder(out)
    for position, item in enumerate(dataset):
        mask = item["loss_mask"]
        if mask is None:
            raise OptionError(f"sample {item['index']} has no loss mask")
        states = item["hidden_states"]
        last = states[:, -1].clone()
        record: dict[str, torch.Tensor | str | bool] = {
            "input_ids": item["token_ids"].clone(),
            "hidden_states": last if norm is None else norm(last),
            "aux_hidden_states": states[:, :-1].flatten(1).clone(),
            "loss_mask": mask.long(),
            "hidden_states_prenorm": norm is None,
            "conversation_id": dataset.entry(position).sample_id or str(item["index"]),
        }
        save_record(record, out / f"{item['index']:09d}.pt")
        on_sample(position + 1)
    return len(dataset)
