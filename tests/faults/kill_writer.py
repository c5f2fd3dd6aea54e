"""Kill a writing process with SIGKILL at random moments, again and again, while readers wait for its files.

After each kill every path that the writer had admitted is either a complete, verified file or an error for its reader; no reader
hangs, and the reaper leaves nothing behind. Victims are forked from this process, which has all imports
done already, so a round takes milliseconds.
"""

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from file_cases import make_data, make_recorder, make_spec
from victims import Figures, Victim, scratch

from layertap.assembly import Rows
from layertap.errors import HiddenStatesError, WaitTimeoutError
from layertap.files.read import read_file
from layertap.files.reap import reap

SPEC = make_spec(num_rows=48, hidden_size=256)


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
    with scratch("kill-writer") as root:
        for number in range(rounds):
            folder = root / str(number)
            folder.mkdir()
            one_round(folder, rng, expected, figures)
            shutil.rmtree(folder)
    return figures


def one_round(folder: Path, rng: random.Random, expected, figures: Figures) -> None:
    """Fork, kill, look."""
    read_end, write_end = os.pipe()
    process = Victim(victim, folder, write_end, rng.randrange(1 << 30))
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

    # counted in paths, so that a slow machine gets as far; ten files fill the budget, so that some are complete by the last
    kill_at, seconds = rng.randrange(40), rng.uniform(0.0, 0.01)
    with ThreadPoolExecutor(8) as readers, os.fdopen(read_end) as paths:
        for number, line in enumerate(paths):  # readers wait while the writer is alive, and when it dies
            if number == kill_at:
                process.kill_after(seconds)
            readers.submit(read, line.strip())
    process.join()
    reap(folder, ttl_seconds=1e-9)
    figures.rounds += 1
    for outcome in outcomes.values():
        figures.count(outcome)
    figures.left_behind += len(os.listdir(folder))
