"""Made the frozen files of format version 2 beside this script (once; they are never made anew).

Run as: PYTHONPATH=tests/files python tests/compat/format_2/make.py
"""

import base64
import json
import tempfile
from pathlib import Path

from file_cases import make_recorder, make_spec, write_sample

from layertap.files.read import load_hidden_states, read_header

HERE = Path(__file__).parent
CASES = {"fp8": make_spec(num_rows=3, layers=(4, 0), dtype="fp8_e4m3")}

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    for name, spec in CASES.items():
        path = Path(folder) / f"{name}.safetensors"
        write_sample(make_recorder(use_synchronization_lock=False), path, spec, request_id="frozen")
        header, loaded = read_header(path), load_hidden_states(path, dtype="float32")
        record = {
            "file": base64.b64encode(path.read_bytes()).decode(),
            "layers": list(header.info.layers),
            "first_position": header.info.first_position,
            "digest": header.digest,
            "token_ids": loaded["token_ids"].tolist(),
            "hidden_states": loaded["hidden_states"].tolist(),
        }
        (HERE / f"{name}.json").write_text(json.dumps(record) + "\n")
