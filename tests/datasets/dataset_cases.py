"""Small data sets of random samples, and the check that one holds what it should."""

from dataclasses import replace

import numpy as np

from layertap.datasets.manifest import Manifest, RowIdentity
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.writer import DatasetWriter, Sample, ShardOptions

IDENTITY = RowIdentity(
    model="org/tiny",
    revision="abc",
    model_fingerprint=None,
    tokenizer_hash="t",
    chat_template_hash="c",
    layers=(0, 3),
    num_layers=4,
    hidden_size=6,
    save_dtype="float32",
    compute_dtype="float32",
    quantization=None,
    residual="blocks of model.layers",
    engine="transformers",
    engine_version="5.19.0",
    options={"max_model_len": 64, "field": None},
)
ROW_BYTES = 2 * 6 * 4


def make_manifest(layout="shards", **changes: object):
    return Manifest(rows=replace(IDENTITY, **changes), layout=layout, input_name="in.jsonl")


def make_sample(index, tokens=None, row_bytes=ROW_BYTES, **more: object):
    random = np.random.default_rng(index)
    tokens = tokens or int(random.integers(1, 20))
    values = random.standard_normal((tokens, row_bytes // 4)).astype(np.float32)
    return Sample(
        index=index,
        source_hash=f"{index:032x}",
        sample_id=f"id-{index}",
        rows=values.view(np.uint8),
        token_ids=random.integers(0, 1000, tokens),
        prompt_tokens=tokens,
        finish_reason="prefill",
        **more,
    )


def write_dataset(folder, indices, *, layout="shards", failures=(), options=None, manifest=None, clock=None):
    """Write (or resume) a data set of random samples the way a run does."""
    manifest = manifest or make_manifest(layout)
    options = options or ShardOptions(fsync=False)
    with locked_folder(folder):
        prepared = prepare_folder(folder, manifest)
        extra = {} if clock is None else {"clock": clock}
        with DatasetWriter(folder, prepared.manifest, options, **extra) as writer:
            for index in indices:
                if prepared.done.get(index) is not None:
                    continue
                if index in failures:
                    writer.add_failure(index=index, source_hash=f"{index:032x}", sample_id=None, reason=f"no {index}")
                else:
                    writer.add(make_sample(index))
    return prepared


def assert_holds(folder, indices):
    """Every sample is there, once, in order, bit for bit, and by its checksum."""
    ds = open_dataset(folder, verify=True)
    assert ds.indices.tolist() == sorted(indices)
    for item in ds:
        sample = make_sample(item["index"])
        assert item["hidden_states"].numpy().tobytes() == sample.rows.tobytes()
        assert item["token_ids"].tolist() == sample.token_ids.tolist()
        assert item["prompt_len"] == sample.prompt_tokens
