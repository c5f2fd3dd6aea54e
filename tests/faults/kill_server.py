"""Kill servers under their clients, and clients of a server, at random moments."""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import torch
from victims import Figures, Victim, WarmModel, prompts, scratch

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, LayertapError, WaitTimeoutError
from layertap.files.read import load_hidden_states
from layertap.files.reap import reap
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings

_CLIENTS = 3


def server(model: WarmModel, storage: Path, pipe: int) -> None:
    """Serve until killed, or until SIGTERM."""
    torch.set_num_threads(1)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    settings = ServerSettings(served_model_names=("tiny",), allow_delete=True, reap_seconds=0.5)
    with run_background(model.front(storage), settings) as running:
        os.write(pipe, f"{running.url}\n".encode())
        # a signal that reaches another thread first wakes nobody who waits without end
        while not ended.wait(0.1):
            pass


def client(url: str, told: list[dict], seed: int, fetch: bool) -> None:
    """Ask for ever; note what the server answered."""
    rng = random.Random(seed)
    with HiddenStatesClient(url, timeout=60, retries=0) as states, contextlib.suppress(LayertapError, OSError):
        while True:
            (prompt,) = prompts(rng, 1)
            answer = states.complete(
                prompt, model="tiny", max_tokens=rng.randrange(1, 8), temperature=0.0, ignore_eos=True,
                n=rng.choice([1, 1, 2]), return_token_ids=True,
                kv_transfer_params={"include_output_tokens": rng.random() < 0.7},
            )  # fmt: skip
            told += [
                {
                    "path": choice["kv_transfer_params"]["hidden_states_path"],
                    "tokens": choice["prompt_token_ids"] + choice["token_ids"],
                }
                for choice in answer["choices"]
            ]
            if fetch:
                states.fetch(answer["choices"][0])


def run_server_kills(rounds: int, seed: int) -> Figures:
    """Each round: a server, three clients, one kill; then every path that was learnt or admitted is asked for."""
    rng = random.Random(seed)
    figures = Figures()
    with scratch("kill-server") as root:
        model = WarmModel(root)
        for number in range(rounds):
            storage = root / f"store-{number}"
            storage.mkdir()
            victim, url = _start(model, storage)
            told: list[dict] = []
            threads = [
                threading.Thread(target=client, args=(url, told, rng.randrange(1 << 30), False))
                for _ in range(_CLIENTS)
            ]
            # counted in answers, so that a slow machine gets as far
            kill_at, seconds = rng.randrange(20), rng.uniform(0.0, 0.05)
            for thread in threads:
                thread.start()
            while len(told) < kill_at and any(thread.is_alive() for thread in threads):
                threads[0].join(0.002)
            victim.kill_after(seconds)
            victim.join()
            for thread in threads:
                thread.join(60)
                figures.hung += thread.is_alive()
            figures.rounds += 1
            _look(model, storage, told, figures)
            reap(storage, ttl_seconds=1e-9)
            figures.left_behind += len(list(storage.iterdir()))
    return figures


def run_client_kills(rounds: int, seed: int) -> Figures:
    """One server; each round kills one client. The server ends what nobody waits for, and goes on."""
    rng = random.Random(seed)
    figures = Figures()
    with scratch("kill-client") as root:
        model = WarmModel(root)
        storage = root / "store"
        storage.mkdir()
        victim, url = _start(model, storage)
        for _ in range(rounds):
            one = Victim(client, url, [], rng.randrange(1 << 30), True)
            one.kill_after(rng.uniform(0.0, 0.35))
            one.join()
            figures.rounds += 1
        with HiddenStatesClient(url, timeout=60) as states:
            figures.hung += not _comes_to_rest(states)
            (prompt,) = prompts(rng, 1)
            answer = states.complete(prompt, model="tiny", max_tokens=4, temperature=0.0)
            figures.count(
                "complete" if model.right(states.fetch(answer["choices"][0])["hidden_states"], prompt) else "wrong"
            )
        os.kill(victim.process.pid, signal.SIGTERM)
        victim.join()
        _look(model, storage, [], figures)
        reap(storage, ttl_seconds=1e-9)
        figures.left_behind += len(list(storage.iterdir()))
    return figures


def _start(model: WarmModel, storage: Path) -> tuple[Victim, str]:
    read_end, write_end = os.pipe()
    victim = Victim(server, model, storage, write_end)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        return victim, lines.readline().strip()


def _look(model: WarmModel, storage: Path, told: list[dict], figures: Figures) -> None:
    tokens = {entry["path"]: entry["tokens"] for entry in told}
    admitted = {str(path).removesuffix(".lock") for path in storage.glob("*.safetensors.lock")}
    files = {str(path) for path in storage.glob("*.safetensors")}
    for path in sorted(admitted | files | set(tokens)):
        try:
            loaded = load_hidden_states(path, timeout=30)
        except WaitTimeoutError:
            figures.count("hung")
        except HiddenStatesError:
            figures.count("told")
        else:
            ids = loaded["token_ids"].tolist()
            mine = path not in tokens or tokens[path][: len(ids)] == ids
            figures.count("complete" if mine and model.right(loaded["hidden_states"], ids) else "wrong")


def _comes_to_rest(states: HiddenStatesClient) -> bool:
    """Whether nothing runs any more after what was left alone has been noticed."""
    pause = threading.Event()
    for _ in range(600):
        text = states._http.get("/metrics").text
        if "layertap_requests_running 0.0" in text:
            return True
        pause.wait(0.05)
    return False
