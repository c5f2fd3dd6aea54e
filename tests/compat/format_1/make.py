"""Made the frozen files of format version 1 beside this script (once; they are never made anew).

Run as: PYTHONPATH=tests/files python tests/compat/format_1/make.py
"""

import base64
import json
import tempfile
from pathlib import Path

from file_cases import make_recorder, make_spec, write_sample

from layertap.capture.request import Window
from layertap.files.read import load_hidden_states, read_header

HERE = Path(__file__).parent
CASES = {
    "float32": make_spec(num_rows=3, layers=(4, 0), hidden_size=2),
    "bfloat16_window": make_spec(
        num_rows=5, layers=(2,), dtype="bfloat16", hidden_size=4, window=Window(positions=(1, 3))
    ),
}

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    for name, spec in CASES.items():
        path = Path(folder) / f"{name}.safetensors"
        write_sample(make_recorder(use_synchronization_lock=False), path, spec, request_id="frozen")
        header, loaded = read_header(path), load_hidden_states(path)
        record = {
            "file": base64.b64encode(path.read_bytes()).decode(),
            "layers": list(header.info.layers),
            "first_position": header.info.first_position,
            "digest": header.digest,
            "token_ids": loaded["token_ids"].tolist(),
            "hidden_states": loaded["hidden_states"].float().tolist(),
        }
        (HERE / f"{name}.json").write_text(json.dumps(record) + "\n")
