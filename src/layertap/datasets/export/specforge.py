"""The format that SpecForge (0.2) trains EAGLE-3 from offline: `data.hidden_states_path: OUT`.

    OUT/rows_0-2000/data_<i>.ckpt    torch.save of a dict, a sample each

    input_ids         int64 [tokens]
    loss_mask         int64 [tokens], 0 or 1
    aux_hidden_state  [1, tokens, layers * hidden]: all layers but the last, one behind the other
    hidden_state      [1, tokens, hidden]: the last layer *behind the final norm*, from which SpecForge's head makes its targets

Rows of a data set are before that norm, so the model has to be there: only its norm is read.
"""

from collections.abc import Callable
from pathlib import Path

from layertap.datasets.export import as_numbers, new_folder, refuse_undraftable, save_record
from layertap.datasets.export.norms import FinalNorm
from layertap.datasets.reader import Dataset
from layertap.errors import OptionError

_FILES_PER_FOLDER = 2000  # SpecForge's own


def export_specforge(
    dataset: Dataset, out: Path, model: str | None = None, on_sample: Callable[[int], None] = lambda _done: None
) -> int:
    """Write a data set in the format of SpecForge.

    Args:
        dataset: with loss masks, and the model's last layer as the last of its layers.
        out: a new folder.
        model: the model of the rows, for its final norm.
        on_sample: called with the number of samples that are done.

    Returns:
        How many samples were written.

    Raises:
        OptionError: the set lacks what the format needs, no model is given, or the folder isn't empty.
        ModelError: the model can't be read.
        OSError: the disk's reason.
    """
    refuse_undraftable(dataset, "SpecForge")
    if model is None:
        raise OptionError(
            "model: SpecForge wants the last hidden state behind the final norm, and rows are saved before it; give the "
            "model, whose norm is applied then"
        )
    norm = FinalNorm(model, dataset.manifest.rows)
    dataset = as_numbers(dataset)
    new_folder(out)
    for position, item in enumerate(dataset):
        mask = item["loss_mask"]
        if mask is None:
            raise OptionError(f"sample {item['index']} has no loss mask")
        states = item["hidden_states"]
        first = position // _FILES_PER_FOLDER * _FILES_PER_FOLDER
        folder = out / f"rows_{first}-{first + _FILES_PER_FOLDER}"
        folder.mkdir(exist_ok=True)
        record = {
            "input_ids": item["token_ids"].clone(),
            "loss_mask": mask.long(),
            "hidden_state": norm(states[:, -1])[None].clone(),
            "aux_hidden_state": states[:, :-1].flatten(1)[None].clone(),
        }
        save_record(record, folder / f"data_{position}.ckpt")
        on_sample(position + 1)
    return len(dataset)
