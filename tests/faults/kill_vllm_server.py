"""Kill the processes of vLLM's HTTP server, and its clients, while rows are read; then start it again on the same folder.

By turns `layertap serve --engine vllm` and plain `vllm serve` with the plugin; API server, engine core, worker and writer process
by turns. A start takes about a minute, so each serves for a number of killed clients, too. All starts share one folder: what a
kill left half-written must go with the next start, and what was complete must stay.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

import checkpoints
import running
from kill_vllm import Warm
from parallel_script import children
from victims import Figures, Victim, scratch
from vllm_process import LAYERTAP, SMALL, STOCK, vllm_serving

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, LayertapError, WaitTimeoutError
from layertap.files.read import load_hidden_states
from layertap.files.reap import reap
from layertap.files.tags import expire_tags

KINDS = ("API server", "engine core", "worker", "writer")
FORMS = {"layertap serve": [*LAYERTAP, "--engine", "vllm"], "vllm serve": STOCK}
_CLIENTS = 4
_CLIENT_KILLS = 8
_READ_SECONDS = 120.0
_END_SECONDS = 20.0


@dataclass
class Store:
    """The folder, what clients were told of it, and what was found complete."""

    folder: Path
    warm: Warm
    told: dict[str, list[int]] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def paths(self) -> set[str]:
        """Every path that anybody can know: answers, tags, locks, files, reasons."""
        found = {str(path).removesuffix(".lock").removesuffix(".error") for path in self.folder.glob("*.safetensors*")}
        for record in (self.folder / "tags").rglob("*.json"):
            found |= {handle["hidden_states_path"] for handle in json.loads(record.read_text())["handles"]}
        return found | set(self.told)

    def read(self, path: str) -> str:
        """What a reader gets."""
        try:
            loaded = load_hidden_states(path, timeout=_READ_SECONDS)
        except WaitTimeoutError:
            return "hung"
        except HiddenStatesError:
            return "told"
        ids = loaded["token_ids"].tolist()
        right = ids == self.told.get(path, ids) and self.warm.right(loaded["hidden_states"], ids)
        return "complete" if right else "wrong"

    def unfinished(self) -> list[str]:
        """Paths that are being written."""
        locks = [str(path).removesuffix(".lock") for path in self.folder.glob("*.safetensors.lock")]
        return [path for path in locks if not os.path.exists(path) and not os.path.exists(f"{path}.error")]

    def temporaries(self) -> list[str]:
        """What is half-written."""
        return [path.name for path in self.folder.iterdir() if path.name.endswith(".layertap-tmp")]


def client(url: str, told: dict[str, list[int]], seed: int, ended: threading.Event | None) -> None:
    """Ask until the server is gone; note what it answered."""
    rng = random.Random(seed)
    with HiddenStatesClient(url, timeout=60, retries=0) as states, contextlib.suppress(LayertapError, OSError):
        while ended is None or not ended.is_set():
            (prompt,) = running.prompts([4 + 7 * rng.randrange(8)], seed=rng.randrange(5))
            answer = states.complete(
                prompt["prompt_token_ids"], model="tiny", max_tokens=1 + 20 * rng.randrange(4), temperature=0.0,
                ignore_eos=True, return_token_ids=True,
                kv_transfer_params={"include_output_tokens": True, "tag": f"t{rng.randrange(1 << 60)}"},
            )  # fmt: skip
            (choice,) = answer["choices"]
            tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
            told[answer["kv_transfer_params"]["hidden_states_path"]] = tokens[:-1]


def run_all(rounds: int, seed: int) -> Iterator[tuple[str, Figures]]:
    """`rounds` starts of a server; figures for each kind of victim."""
    rng = random.Random(seed)
    figures = {kind: Figures() for kind in (*KINDS, "client")}
    with scratch("kill-vllm-server") as root:
        checkpoint = checkpoints.save("llama", root)
        store = Store(root / "states", Warm(None, checkpoint))
        store.folder.mkdir()
        for number in range(rounds):
            kind = KINDS[number % len(KINDS)]
            form = list(FORMS)[(number + number // len(KINDS)) % len(FORMS)]
            _one_round(checkpoint, store, form, kind, rng, figures)
        reap(store.folder, ttl_seconds=1e-9)
        expire_tags(str(store.folder), time.time() + 1)
        left = [path for path in store.folder.rglob("*") if path.is_file()]
        figures[KINDS[(rounds - 1) % len(KINDS)]].left_behind += len(left)
    yield from ((kind, one) for kind, one in figures.items() if one.rounds)


def _one_round(
    checkpoint: Path, store: Store, form: str, kind: str, rng: random.Random, figures: dict[str, Figures]
) -> None:
    began = time.monotonic()
    mine = figures[kind]
    extra = {"layers": "all", "shared_storage_path": str(store.folder), "min_free_bytes": 0}
    transfer = {
        "kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra,
    }  # fmt: skip
    words = [str(checkpoint), "--kv-transfer-config", json.dumps(transfer), "--served-model-name", "tiny", *SMALL]
    with vllm_serving(FORMS[form], *words, environment={"LAYERTAP_VLLM_WRITER": "process"}) as (url, process):
        mine.left_behind += not _until(lambda: not store.temporaries())
        victims = _processes(process.pid)
        for _ in range(_CLIENT_KILLS):
            one = Victim(client, url, {}, rng.randrange(1 << 30), None)
            one.kill_after(rng.uniform(0.1, 0.6))
            one.join()
            figures["client"].rounds += 1
        with ThreadPoolExecutor(16) as pool:
            ended = threading.Event()
            threads = [
                threading.Thread(target=client, args=(url, store.told, rng.randrange(1 << 30), ended))
                for _ in range(_CLIENTS)
            ]
            for thread in threads:
                thread.start()
            ended.wait(rng.uniform(0.3, 2.0))
            readers = {path: pool.submit(store.read, path) for path in store.unfinished()}  # they wait
            os.kill(victims[kind], signal.SIGKILL)
            mine.rounds += 1
            if kind == "writer":  # the engine goes on without it, and says so to each reader
                mine.hung += not _still_answers(url, store)
            ended.set()
            for thread in threads:
                thread.join(90)
                mine.hung += thread.is_alive()
            outcomes = {path: reader.result() for path, reader in readers.items()}
        orphans = [] if kind == "writer" else _orphans([pid for name, pid in victims.items() if name != kind])
        for pid in orphans:  # what vLLM doesn't end by itself would hold the log of the server
            os.kill(pid, signal.SIGKILL)
        for name, pid in victims.items():
            mine.hung += kind != "writer" and name == "writer" and not _ends(pid, _END_SECONDS)
    _look(store, outcomes, mine, answered_is_complete=kind == "API server")
    seconds = time.monotonic() - began
    print(
        f"{form}, {kind} killed: {len(outcomes)} readers waited, {len(store.seen)} paths so far, "
        f"{len(orphans)} of vLLM's processes went on; {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _look(store: Store, outcomes: dict[str, str], figures: Figures, *, answered_is_complete: bool) -> None:
    """Every path gives right rows or a reason, and what was complete before is so now.

    Behind a killed API server vLLM's engine goes on, so what a client was answered before must be there.
    """
    for path in sorted(store.paths()):
        outcome = store.read(path)
        if path in outcomes and outcomes[path] != outcome:
            outcome = outcomes[path] if outcomes[path] in ("wrong", "hung") else "wrong"
        if path in store.complete and outcome != "complete":
            outcome = "wrong"
        if path in store.seen:
            figures.wrong += outcome == "wrong"
            continue
        store.seen.add(path)
        if answered_is_complete and path in store.told and outcome == "told":
            outcome = "wrong"
        if outcome == "complete":
            store.complete.add(path)
        figures.count(outcome)


def _still_answers(url: str, store: Store) -> bool:
    told: dict[str, list[int]] = {}
    with HiddenStatesClient(url, timeout=60, retries=0) as states:
        answer = states.complete([9, 10, 11], model="tiny", max_tokens=2, temperature=0.0, ignore_eos=True)
    told[answer["kv_transfer_params"]["hidden_states_path"]] = []
    return [store.read(path) for path in told] == ["told"]


def _processes(server: int) -> dict[str, int]:
    """By kind: the server's process is vLLM's API server."""
    (core,) = [pid for pid, name in children(server).items() if "EngineCore" in name]
    (worker,) = [pid for pid, name in children(core).items() if "Worker" in name]
    return {"API server": server, "engine core": core, "worker": worker, "writer": _writer_of(worker)}


def _writer_of(worker: int) -> int:
    """It has left the process tree; its last argument is the process that it serves."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"layertap.engines.vllm.writer" in words and words[-2] == str(worker).encode():
                return int(path.parent.name)
    raise AssertionError(f"worker {worker} has no writer process")


def _orphans(pids: list[int]) -> list[int]:
    """Those that don't end by themselves. The writer ends when its worker has."""
    deadline = time.monotonic() + _END_SECONDS
    return [pid for pid in pids[:-1] if not _ends(pid, max(0.0, deadline - time.monotonic()))]


def _ends(pid: int, seconds: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)


def _until(condition) -> bool:
    """Whether it comes true within ten seconds."""
    pause = threading.Event()
    for _ in range(200):
        if condition():
            return True
        pause.wait(0.05)
    return False
