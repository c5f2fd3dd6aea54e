"""Kill readers while they wait, open and check files: the other readers, and the next writer of the same path, don't notice."""

import os
import random
from pathlib import Path

from file_cases import make_data, make_recorder, make_spec
from victims import Figures, Victim, scratch

from layertap.assembly import Rows
from layertap.errors import HiddenStatesError, LayertapError, WaitTimeoutError
from layertap.files.read import read_file
from layertap.files.reap import reap

SPEC = make_spec(num_rows=48, hidden_size=256)
_NUM_FILES = 6
_NUM_READERS = 3


def writer(folder: Path, asked: int, answers: int, not_mine: tuple[int, ...]) -> None:
    """For each line that is asked, replace all files: first every lock is there and said, then the rows come."""
    for descriptor in not_mine:  # the parent's ends: while this process holds one, it never sees the end
        os.close(descriptor)
    recorder = make_recorder(num_writer_threads=2)
    with os.fdopen(asked) as lines:
        for line in lines:
            seed = int(line)
            captures = []
            for number in range(_NUM_FILES):
                path = folder / f"{number}.safetensors"
                captures.append(recorder.admit(SPEC, request_id=f"{seed}-{number}", path=path, overwrite=True))
            os.write(answers, b"admitted\n")
            for number, capture in enumerate(captures):
                rows, ids = make_data(SPEC, seed=seed + number)
                for start in range(0, 48, 16):
                    part = slice(start, start + 16)
                    capture.add(Rows(0, start, ids[part], slice(0, 2), rows[part]))
                capture.finish(ids, "prefill")
            for capture in captures:
                capture.result.result()
            os.write(answers, b"published\n")
    recorder.close()


def reader(folder: Path) -> None:
    """Read everything again and again."""
    while True:
        for number in range(_NUM_FILES):
            try:
                read_file(folder / f"{number}.safetensors", timeout=30)
            except LayertapError:
                continue


def run(rounds: int, seed: int) -> Figures:
    """Each round kills one reader; three run at a time."""
    rng = random.Random(seed)
    figures = Figures()
    with scratch("kill-reader") as folder:
        asked, ask = os.pipe()
        answered, answer = os.pipe()
        process = Victim(writer, folder, asked, answer, (ask, answered))
        os.close(asked)
        os.close(answer)
        with os.fdopen(answered) as answers:
            done = 0
            while done < rounds:
                count = min(_NUM_READERS, rounds - done)
                victims = [Victim(reader, folder) for _ in range(count)]
                base = rng.randrange(7)
                os.write(ask, f"{base}\n".encode())
                answers.readline()
                for victim in victims:
                    victim.kill_after(rng.uniform(0.0, 0.02))
                for number in range(_NUM_FILES):
                    figures.count(_read(folder / f"{number}.safetensors", base + number))
                answers.readline()
                for victim in victims:
                    victim.join()
                done += count
            os.close(ask)
        process.join()
        reap(folder, ttl_seconds=1e-9)
        figures.rounds = rounds
        figures.left_behind = len(os.listdir(folder))
    return figures


def _read(path: Path, seed: int) -> str:
    try:
        loaded = read_file(path, timeout=30)
    except WaitTimeoutError:
        return "hung"
    except HiddenStatesError:
        return "wrong"  # this writer lives, so its reader must get the file
    rows, ids = make_data(SPEC, seed=seed)
    right = loaded.rows.tobytes() == rows.tobytes() and loaded.token_ids.tolist() == ids.tolist()
    return "complete" if right else "wrong"
