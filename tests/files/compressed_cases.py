"""Files of compressed rows for the tests."""

from file_cases import FACTS, make_data, make_spec

from layertap.datasets.shards import ShardWriter
from layertap.files.format import FileInfo, Packed


def write_compressed(path, dtype="float32", num_rows=6, layers=(3, 1), hidden_size=8, seed=0, step=None):
    """Write a file whose rows are compressed, `step` of them at a time; returns rows and ids."""
    spec = make_spec(num_rows=num_rows, layers=layers, dtype=dtype, hidden_size=hidden_size)
    rows, ids = make_data(spec, seed=seed)
    flat = rows.reshape(num_rows, -1)
    info = FileInfo(
        layers=layers,
        num_rows=0,
        hidden_size=hidden_size,
        dtype=dtype,
        first_position=0,
        prompt_len=num_rows,
        num_tokens=0,
        num_layers=4,
        model="tiny",
        facts=FACTS,
        packed=Packed(),
    )
    writer = ShardWriter(path, info, max_rows=num_rows, fsync=False)
    try:
        for begin in range(0, num_rows, step or num_rows):
            end = min(num_rows, begin + (step or num_rows))
            writer.append(flat[begin:end], ids[begin:end])
        writer.publish()
    finally:
        writer.discard()
    return flat, ids
