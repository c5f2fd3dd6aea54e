"""A store of very many files: what each further file costs, and what looks through all of them.

Run as: python tests/faults/many_files.py [--files 100000]

Prints a line of JSON for each tenth of the way, in CPU time; a cost that grows with the number of files would show.
"""

import argparse
import json
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

_SPEC = make_spec(num_rows=2, hidden_size=8)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    count = parser.parse_args().files
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
        recorder.close()


if __name__ == "__main__":
    main()
