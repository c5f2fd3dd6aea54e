"""Kill a vLLM engine, its writer process, and readers of its files; and give its writer a disk that is slow, or full now and then.

One engine is started on the CPU; each round forks it, with a writer process of its own. Scheduler, worker and tap are in one
process, as in vLLM's own deployments with one worker. A fork has no threads of its parent, so what layertap starts is made anew.
"""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import checkpoints
import running
import torch
from victims import Figures, Victim, scratch

from layertap.errors import HiddenStatesError, WaitTimeoutError
from layertap.files.read import load_hidden_states
from layertap.files.reap import reap
from layertap.testing import oracle

KINDS: dict[str, tuple[float, dict[str, object]]] = {
    "worker": (0.4, {}),
    "writer": (0.3, {"batches": 10}),
    "client": (0.1, {"batches": 2}),
    "slow disk": (0.1, {"kind": "disk", "disk": "slow:0.1", "batches": 3}),
    "full disk": (0.1, {"kind": "disk", "disk": "full:0.1", "batches": 3}),
}
"""Share of the rounds, and what differs from the arguments of `run`."""
_READ_SECONDS = 120
_BATCH = 4
_FAULTY = Path(__file__).with_name("faulty_disk")


class Warm:
    """A started engine that can be forked, and the oracle of its model."""

    def __init__(self, llm, checkpoint: Path) -> None:
        self.llm = llm
        self._model = running.load_oracle("llama", checkpoint)
        self._truth: dict[tuple[int, ...], torch.Tensor] = {}

    def right(self, hidden_states, token_ids) -> bool:
        """Whether rows are those of plain transformers."""
        key = tuple(token_ids)
        if key not in self._truth:
            self._truth[key] = oracle.hidden_states(self._model, list(key))
        exact = self._truth[key]
        if hidden_states.shape != exact.shape:
            return False
        errors = (hidden_states - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-6)
        return bool(errors.max() < running.TOLERANCE)


@contextmanager
def started(root: Path):
    """An engine of this module's own."""
    checkpoint = checkpoints.save("llama", root)
    previous = os.environ.get("LAYERTAP_VLLM_WRITER")
    os.environ["LAYERTAP_VLLM_WRITER"] = "process"
    try:
        extra = {"allow_custom_save_path": True, "min_free_bytes": 0}
        with running.running(checkpoint, root / "states", extra, block_size=32) as llm:
            yield Warm(llm, checkpoint)
    finally:
        if previous is None:
            del os.environ["LAYERTAP_VLLM_WRITER"]


def engine(warm: Warm, folder: Path, pipe: int, seed: int, batches: int, disk: str) -> None:
    """The forked engine: some batches, or until it is killed; says what each path's sequence is as soon as it ended."""
    torch.set_num_threads(1)
    if disk:
        os.environ["LAYERTAP_TEST_DISK"] = disk
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_FAULTY), os.environ.get("PYTHONPATH", "")])
    rng = random.Random(seed)
    tap = _renewed(warm.llm, num_writers=rng.randint(1, 2))
    os.write(pipe, f"{json.dumps({'writer': _pid_of(tap)})}\n".encode())
    core = warm.llm.llm_engine
    for batch in range(batches):
        paths = {}
        for i in range(_BATCH):
            name = f"{seed}-{batch}-{i}"
            paths[name] = str(folder / f"{name}.safetensors")
            prompt = running.prompts([4 + 7 * rng.randrange(8)], seed=rng.randrange(5))[0]
            options = {"include_output_tokens": True, "hidden_states_path": paths[name]}
            core.add_request(name, prompt, running.params(1 + 4 * rng.randrange(4), **options))
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                    told = {"path": paths[output.request_id], "tokens": tokens[:-1]}
                    os.write(pipe, f"{json.dumps(told)}\n".encode())
    tap.close()
    os._exit(0)


def _renewed(llm, num_writers: int):
    """The tap of this process, with writers of its own."""
    from vllm.distributed.parallel_state import get_pp_group

    from layertap.engines.vllm import worker
    from layertap.engines.vllm.configured import configured

    (tap,) = worker._taps.values()
    config = llm.llm_engine.vllm_config
    found = configured(config)
    found = replace(found, options=replace(found.options, num_writer_processes=num_writers))
    tap.unpacker = worker._unpacker(config, found, tap.tap, get_pp_group())
    return tap


def _pid_of(tap) -> int:
    pause = threading.Event()
    writers = getattr(tap.unpacker, "all", [tap.unpacker])
    while any(writer.pid is None for writer in writers):
        pause.wait(0.005)
    return writers[-1].pid


def reader(path: str) -> None:
    """Read again and again until killed."""
    while True:
        load_hidden_states(path, timeout=_READ_SECONDS)


def run_all(rounds: int, seed: int) -> Iterator[tuple[str, Figures]]:
    """All kinds on one engine."""
    running.set_environment()
    with scratch("kill-vllm-engine") as root, started(root) as warm:
        for name, (share, options) in KINDS.items():
            yield name, run(max(1, round(share * rounds)), seed, warm, **{"kind": name, **options})


def run(rounds: int, seed: int, warm: Warm, kind: str, batches: int = 1 << 30, disk: str = "") -> Figures:
    """Rounds of one kind: "worker", "writer" or "client" are killed, or "disk" is `slow:SHARE` or `full:SHARE`."""
    rng = random.Random(seed)
    figures = Figures()
    with scratch("kill-vllm") as root:
        for number in range(rounds):
            folder = root / f"round-{number}"
            folder.mkdir()
            _one_round(warm, folder, rng, figures, kind, batches, disk)
    return figures


def _one_round(
    warm: Warm, folder: Path, rng: random.Random, figures: Figures, kind: str, batches: int, disk: str
) -> None:
    read_end, write_end = os.pipe()
    victim = Victim(engine, warm, folder, write_end, rng.randrange(1 << 30), batches, disk)
    os.close(write_end)
    outcomes: dict[str, str] = {}
    told: dict[str, list[int]] = {}

    def read(path: str) -> None:
        try:
            loaded = load_hidden_states(path, timeout=_READ_SECONDS)
        except WaitTimeoutError:
            outcomes[path] = "hung"
        except HiddenStatesError:
            outcomes[path] = "told"
        else:
            ids = loaded["token_ids"].tolist()
            right = ids == told.get(path, ids) and warm.right(loaded["hidden_states"], ids)
            outcomes[path] = "complete" if right else "wrong"

    with ThreadPoolExecutor(8) as pool, os.fdopen(read_end) as lines:
        writer = json.loads(lines.readline())["writer"]
        if kind == "worker":
            victim.kill_after(rng.uniform(0.0, 1.0))
        elif kind == "writer":
            threading.Timer(rng.uniform(0.0, 0.8), _kill, [writer]).start()
        for line in lines:  # readers wait while the engine runs, and when it dies
            found = json.loads(line)
            told[found["path"]] = found["tokens"]
            if kind == "client":
                one = Victim(reader, found["path"])
                one.kill_after(rng.uniform(0.0, 0.05))
                one.join()
            pool.submit(read, found["path"])
    victim.join()
    for path in sorted(str(path).removesuffix(".lock") for path in folder.glob("*.safetensors.lock")):
        if path not in outcomes:
            read(path)
    reap(folder, ttl_seconds=1e-9)
    figures.rounds += 1
    for outcome in outcomes.values():
        figures.count(outcome)
    figures.left_behind += len(os.listdir(folder))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
