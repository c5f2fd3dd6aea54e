"""Small samples for the tests of files."""

import numpy as np

from layertap.assembly import Rows
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, Window
from layertap.writing.recorder import Recorder

FACTS = {"engine": "test", "engine_version": "0", "compute_dtype": "float32"}


def make_recorder(**options):
    options.setdefault("min_free_bytes", 0)
    return Recorder(StoreOptions(**options), model="tiny", num_layers=4, facts=FACTS)


def make_spec(num_rows=6, layers=(3, 1), dtype="float32", hidden_size=8, **more):
    return CaptureSpec(
        layers=layers,
        dtype=dtype,
        hidden_size=hidden_size,
        prompt_len=num_rows,
        window=more.pop("window", Window()),
        **more,
    )


def make_data(spec, num_rows=None, seed=0):
    """Random rows uint8 [rows, layers, bytes of a slot] and token ids."""
    num_rows = spec.prompt_len if num_rows is None else num_rows
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_rows, len(spec.layers), spec.hidden_size)).astype(np.float32)
    if spec.dtype == "bfloat16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    elif spec.dtype == "float16":
        raw = values.astype(np.float16)
    elif spec.dtype == "fp8_e4m3":
        raw = np.zeros((num_rows, len(spec.layers), spec.slot_bytes), np.uint8)
        raw[:, :, :-8] = rng.integers(0, 0x7F, values.shape) | rng.integers(0, 2, values.shape) << 7
        raw[:, :, -8:-4] = rng.uniform(0.1, 4, (*values.shape[:2], 1)).astype("<f4").view(np.uint8)
    else:
        raw = values
    return raw.view(np.uint8).reshape(num_rows, len(spec.layers), spec.slot_bytes), rng.integers(0, 1000, num_rows)


def write_sample(recorder, path, spec, seed=0, chunk=None, **admit):
    """One sample through the whole corridor; returns its rows, ids and result."""
    rows, ids = make_data(spec, seed=seed)
    capture = recorder.admit(spec, request_id=admit.pop("request_id", f"r{seed}"), path=path, **admit)
    chunk = chunk or len(ids)
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        capture.add(Rows(0, start, ids[part], slice(0, len(spec.layers)), rows[part]))
    return rows, ids, capture.finish(ids, "prefill").result(30)
