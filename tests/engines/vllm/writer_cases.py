"""What writers of a tiny model in float32 are told, for tests without an engine."""

from layertap.capture.options import StoreOptions
from layertap.engines.vllm.unpack import GatherRoom
from layertap.engines.vllm.writer import WriterSetup


def writer_setup(folder, taps, num_cells, cell_bytes, *, num_layers, num_gathered, **options):
    """Of a ring with so many cells; `options` are of the store."""
    return WriterSetup(
        options=StoreOptions(shared_storage_path=str(folder), min_free_bytes=0, **options),
        model="tiny",
        num_layers=num_layers,
        facts={"engine": "vllm", "engine_version": "0", "compute_dtype": "float32"},
        taps=taps,
        dtype="float32",
        num_cells=num_cells,
        cell_bytes=cell_bytes,
        gather=GatherRoom(num_requests=num_gathered, limit_bytes=1 << 20),
    )
