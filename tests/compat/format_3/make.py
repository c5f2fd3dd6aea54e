"""Made the frozen file of format version 3 beside this script (once; it is never made anew).

Run as: PYTHONPATH=tests/files python tests/compat/format_3/make.py
"""

import base64
import json
import tempfile
from pathlib import Path

from compressed_cases import write_compressed

from layertap.files.read import load_hidden_states, read_header

HERE = Path(__file__).parent

if __name__ == "__main__":
    path = Path(tempfile.mkdtemp()) / "a.safetensors"
    write_compressed(path, "bfloat16", num_rows=5, layers=(4, 0))
    header, loaded = read_header(path), load_hidden_states(path, dtype="float32")
    record = {
        "file": base64.b64encode(path.read_bytes()).decode(),
        "layers": list(header.info.layers),
        "first_position": header.info.first_position,
        "digest": header.digest,
        "token_ids": loaded["token_ids"].tolist(),
        "hidden_states": loaded["hidden_states"].tolist(),
    }
    (HERE / "bfloat16.json").write_text(json.dumps(record) + "\n")
