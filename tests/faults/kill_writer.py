"""Kill a writing process with SIGKILL at random moments, again and again, while readers wait for its files.

Run as: python tests/faults/kill_writer.py [--rounds 1000] [--seed 0]

After each kill every path that the writer had admitted is either a complete, verified file or an error for its reader; no reader
hangs, and the reaper leaves nothing behind. Prints one line of figures. Victims are forked from this process, which has all imports
done already, so a round takes milliseconds.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "files"))

from file_cases import make_data, make_recorder, make_spec

from layertap.assembly import Rows
from layertap.errors import HiddenStatesError, WaitTimeoutError
from layertap.files.read import read_file
from layertap.files.reap import reap

fork = multiprocessing.get_context("fork")
SPEC = make_spec(num_rows=48, hidden_size=256)


@dataclass
class Figures:
    """What happened over all rounds. Anything in the last three is a fault of ours."""

    rounds: int = 0
    admitted: int = 0
    complete: int = 0
    told: int = 0
    wrong: int = 0
    hung: int = 0
    left_behind: int = 0

    @property
    def faultless(self) -> bool:
        return self.wrong == self.hung == self.left_behind == 0


def victim(folder: Path, pipe, seed: int) -> None:
    """Write samples, several at once, until killed; say each path as a client would learn it."""
    recorder = make_recorder(num_writer_threads=3, max_bytes_in_flight=1 << 20)
    number = 0
    while True:
        batch = []
        for _ in range(4):
            path = folder / f"{number}.safetensors"
            capture = recorder.admit(SPEC, request_id=str(number), path=path)
            os.write(pipe, f"{number}\n".encode())
            batch.append((capture, *make_data(SPEC, seed=number % 7)))
            number += 1
        for start in range(0, 48, 16):
            for capture, rows, ids in batch:
                part = slice(start, start + 16)
                capture.add(Rows(0, start, ids[part], slice(0, 2), rows[part]))
        for capture, _, ids in batch:
            capture.finish(ids, "prefill")


def run(rounds: int, seed: int) -> Figures:
    """All rounds; see the module's docstring."""
    rng = random.Random(seed)
    figures = Figures()
    expected = {n: make_data(SPEC, seed=n) for n in range(7)}
    root = Path(tempfile.mkdtemp(prefix="layertap-kill-"))
    for number in range(rounds):
        folder = root / str(number)
        folder.mkdir()
        one_round(folder, rng, expected, figures)
        shutil.rmtree(folder)
    shutil.rmtree(root)
    return figures


def one_round(folder: Path, rng: random.Random, expected, figures: Figures) -> None:
    read_end, write_end = os.pipe()
    process = fork.Process(target=victim, args=(folder, write_end, rng.randrange(1 << 30)))
    process.start()
    os.close(write_end)
    outcomes = {}

    def read(name: str) -> None:
        try:
            loaded = read_file(folder / f"{name}.safetensors", timeout=30)
        except WaitTimeoutError:
            outcomes[name] = "hung"
        except HiddenStatesError:
            outcomes[name] = "told"
        else:
            rows, ids = expected[int(name) % 7]
            right = loaded.rows.tobytes() == rows.tobytes() and loaded.token_ids.tolist() == ids.tolist()
            outcomes[name] = "complete" if right else "wrong"

    threading.Timer(rng.uniform(0.0, 0.03), os.kill, (process.pid, signal.SIGKILL)).start()
    with ThreadPoolExecutor(8) as readers, os.fdopen(read_end) as paths:
        for line in paths:  # readers wait while the writer is alive, and when it dies
            readers.submit(read, line.strip())
    process.join()
    reap(folder, ttl_seconds=1e-9)
    figures.rounds += 1
    figures.admitted += len(outcomes)
    for outcome in outcomes.values():
        setattr(figures, outcome, getattr(figures, outcome) + 1)
    figures.left_behind += len(os.listdir(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.rounds, arguments.seed)
    print(json.dumps(asdict(result)))
    sys.exit(0 if result.faultless else 1)
