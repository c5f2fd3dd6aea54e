"""What the kill tests share: forked victims, one tiny model that is warm already, and the figures."""

import contextlib
import multiprocessing
import os
import random
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from layertap import AsyncLLM
from layertap.capture.options import StoreOptions
from layertap.frontend import Frontend
from layertap.testing import oracle, zoo

fork = multiprocessing.get_context("fork")
LAYERS = (1, 2, 4)
TOLERANCE = 1e-4


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

    def count(self, outcome: str) -> None:
        """One path, or one sample, and what its reader got."""
        self.admitted += 1
        setattr(self, outcome, getattr(self, outcome) + 1)

    def __add__(self, other: "Figures") -> "Figures":
        mine, theirs = asdict(self), asdict(other)
        return Figures(**{name: mine[name] + theirs[name] for name in mine})


@contextlib.contextmanager
def scratch(name: str):
    """A folder that goes away."""
    with tempfile.TemporaryDirectory(prefix=f"layertap-{name}-") as folder:
        yield Path(folder)


class Victim:
    """A forked child that runs `work(*arguments)` until it is killed."""

    def __init__(self, work, *arguments) -> None:
        self.process = fork.Process(target=_quietly, args=(work, arguments))
        self.process.start()

    def kill_after(self, seconds: float) -> None:
        """Kill it from a thread."""
        threading.Timer(seconds, self.kill).start()

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more. Nothing happens where it has ended: its pid may be another's by now."""
        self.process.kill()

    def join(self) -> None:
        """Wait for its end."""
        self.process.join()


def _quietly(work, arguments) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    work(*arguments)


class WarmModel:
    """A tiny model whose self-tests have run, so that a forked child works at once; and its oracle."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = zoo.save("llama", folder)
        llm = AsyncLLM(str(self.checkpoint), layers=LAYERS)
        self.engine = llm.front.engine
        self.engine.routes()
        self.engine.verdict()
        self._reference = zoo.build("llama")
        self._truth = {}

    def front(self, storage: Path, **options) -> Frontend:
        """A new core over the warm engine; in the child, since its threads would stay behind in a fork."""
        store = StoreOptions(shared_storage_path=str(storage), min_free_bytes=0, **options)
        return Frontend(self.engine, store, stores=True, layers=LAYERS, weights_version=None)

    def right(self, hidden_states, token_ids) -> bool:
        """Whether rows [tokens, layers, hidden] are those of plain transformers."""
        key = tuple(int(token) for token in token_ids)
        if key not in self._truth:
            self._truth[key] = oracle.hidden_states(self._reference, list(key), list(LAYERS))
        exact = self._truth[key]
        if hidden_states.shape != exact.shape:
            return False
        errors = (hidden_states - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-6)
        return bool(errors.max() < TOLERANCE)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Some prompts, of few kinds, so that the oracle need not be asked for each."""
    made = []
    for _ in range(count):
        seed = rng.randrange(40)
        made.append([8 + (seed * 7 + i * (seed + 3)) % 250 for i in range(3 + seed % 20)])
    return made
