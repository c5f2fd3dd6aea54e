"""A store of very many files: what each further file costs, and what looks through all of them.

Run as: python tests/faults/many_files.py [--files 100000] [--names 0]

Prints a line of JSON for each tenth of the way, in CPU time; a cost that grows with the number of files would show. With `--names`
the folder is then filled up to so many names of files (hard links, so that millions fit), and all of them are looked through and
removed in the end.
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "files"))

from file_cases import make_data, make_recorder, make_spec
from victims import scratch

from layertap.assembly import Rows
from layertap.files.read import read_file
from layertap.files.reap import reap
from layertap.writing.recorder import Recorder

_SPEC = make_spec(num_rows=2, hidden_size=8)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--names", type=int, default=0)
    asked = parser.parse_args()
    count = asked.files
    rows, ids = make_data(_SPEC)
    with scratch("many-files") as folder:
        recorder = make_recorder(shared_storage_path=str(folder), max_storage_bytes=1 << 40)
        step = max(1, count // 10)
        for first in range(0, count, step):
            began = time.process_time()
            for number in range(first, first + step):
                capture = recorder.admit(_SPEC, request_id=str(number), path=folder / f"{number}.safetensors")
                capture.add(Rows(0, 0, ids, slice(0, 2), rows))
                capture.finish(ids, "prefill").result(60)
            wrote = time.process_time()
            for number in range(first, first + step, 100):
                read_file(folder / f"{number}.safetensors")
            read = time.process_time()
            recorder.room.recount()
            counted = time.process_time()
            reap(folder, ttl_seconds=1e6)
            done = time.process_time()
            line = {
                "files": first + step,
                "us_per_file": round((wrote - began) / step * 1e6),
                "us_per_read": round((read - wrote) / len(range(first, first + step, 100)) * 1e6),
                "recount_s": round(counted - read, 2),
                "reap_s": round(done - counted, 2),
                "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
            print(json.dumps(line), flush=True)
        left = _crowd(folder, recorder, asked.names - count) if asked.names else 0
        recorder.close()
    return 1 if left else 0


def _crowd(folder: Path, recorder: Recorder, more: int) -> int:
    """Names until nobody would list them; a request and a reader in their midst, then the reaper's work."""
    for number in range(more):
        os.link(folder / f"{number // 10_000}.safetensors", folder / f"linked-{number}.safetensors")
    rows, ids = make_data(_SPEC)
    began = time.process_time()
    for number in range(100):
        capture = recorder.admit(_SPEC, request_id=f"late-{number}", path=folder / f"late-{number}.safetensors")
        capture.add(Rows(0, 0, ids, slice(0, 2), rows))
        capture.finish(ids, "prefill").result(60)
        read_file(folder / f"late-{number}.safetensors")
    wrote = time.process_time()
    recorder.room.recount()
    counted = time.process_time()
    reap(folder, ttl_seconds=1e6)
    looked = time.process_time()
    removed = len(reap(folder, ttl_seconds=1e-9).expired)
    left = sum(1 for _ in os.scandir(folder))
    line = {
        "us_per_file_and_read": round((wrote - began) * 1e4),
        "recount_s": round(counted - wrote, 1),
        "reap_s": round(looked - counted, 1),
        "removed": removed,
        "remove_s": round(time.process_time() - looked, 1),
        "left": left,
    }
    print(json.dumps(line), flush=True)
    return left


if __name__ == "__main__":
    sys.exit(main())
