"""How many records an input file holds, for progress: exact where that is cheap, else by extrapolation."""

from layertap.datasets.inputs import InputFile

_COUNTED_BYTES = 64 << 20


def estimate_records(source: InputFile) -> int | None:
    """Count the records of an input, or estimate them from its first 64 MiB; None where neither is cheap."""
    if source.format == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            count: int | None = pq.read_metadata(source.path).num_rows
        except (pa.ArrowException, OSError):
            return None  # reading it will say what is wrong
    elif source.format == "jsonl" or (source.format == "text" and source.text_unit == "line"):
        count = _count_lines(source)
    else:
        count = None
    if count is None:
        return None
    rest, number = source.share
    return len(range(rest, count if source.limit is None else min(count, source.limit), number))


def _count_lines(source: InputFile) -> int:
    size = source.path.stat().st_size
    with source.path.open("rb") as file:
        head = file.read(_COUNTED_BYTES)
    lines = sum(1 for line in head.split(b"\n") if line.strip())
    return lines if size <= len(head) else round(lines * size / len(head))
