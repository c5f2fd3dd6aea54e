"""A server that runs on while its clients are killed, and is itself: nothing lost, nothing left, nothing unverified.

Run as: python tests/serving/soak.py [SECONDS] [CHECKPOINT]

Client processes ask, fetch, verify and note what they verified; some are killed at random moments. Half-way the server is killed
(SIGKILL) and started again on the same store. In the end the store is looked through: no temporary file, nothing older than its
time to live, every file that is there complete, and every file that a client was told of and that has not expired is there or says
why not. Clients see errors only while the server is away.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ports import free_port

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, LayertapError
from layertap.files.read import read_file

TTL_SECONDS = 20.0
NUM_CLIENTS = 4
LEAST_KILLS, LEAST_VERIFIED = 3, 20
"""It goes on until there were so many, however slow the machine is."""
_REAPED_AFTER_SECONDS = 30.0  # the reaper's period is 10
_BACK_SECONDS = 10.0  # a client that tried for the last time before the server was back notes it within this


def client(url, notes, seed):
    """Ask for ever; one line per verified file."""
    rng = random.Random(seed)
    with HiddenStatesClient(url, local=bool(seed % 2), timeout=30) as states, open(notes, "a", buffering=1) as log:
        while True:
            body = {"prompt": "soak " * rng.randrange(1, 8), "max_tokens": rng.randrange(1, 30), "ignore_eos": True}
            try:
                answer = states.complete(
                    **body, n=rng.choice([1, 1, 2]), return_token_ids=True,
                    kv_transfer_params={"include_output_tokens": rng.random() < 0.7},
                )  # fmt: skip
                for choice in answer["choices"]:
                    log.write(
                        json.dumps({"told": choice["kv_transfer_params"]["hidden_states_path"], "at": time.time()})
                        + "\n"
                    )
                    loaded = states.fetch_raw(choice)
                    tokens = choice["prompt_token_ids"] + choice["token_ids"]
                    if loaded.token_ids.tolist() != tokens[: len(loaded.token_ids)]:
                        log.write(json.dumps({"wrong": answer["id"]}) + "\n")
                    log.write(json.dumps({"verified": answer["id"]}) + "\n")
                    if rng.random() < 0.3:
                        # noted first: this process may be killed at any moment
                        log.write(json.dumps({"deleted": choice["kv_transfer_params"]["hidden_states_path"]}) + "\n")
                        states.delete(choice)
            except (LayertapError, OSError, ValueError) as exc:  # the server may be down just now
                log.write(json.dumps({"error": f"{type(exc).__name__}: {exc}"[:400], "at": time.time()}) + "\n")
                time.sleep(0.2)


class Server:
    """`layertap serve` on one port and one store."""

    def __init__(self, checkpoint, storage, port):
        self.command = [
            sys.executable, "-c", "from layertap.cli import main; main()", "serve", str(checkpoint), "--port", str(port),
            "--layers", "1,2,4", "--storage", str(storage), "--ttl-seconds", str(TTL_SECONDS), "--min-free-bytes", "0",
            "--allow-delete",
        ]  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"

    def start(self):
        """Returns when it answers."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=environment)
        log = []
        for line in self.process.stderr:
            log.append(line)
            if " serving " in line:
                threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()
                return
        raise RuntimeError("the server didn't start:\n" + "".join(log[-40:]))

    def end(self, number):
        """Returns when it is gone."""
        self.process.send_signal(number)
        self.process.wait(120)


class Client:
    """A client process, and what it noted."""

    def __init__(self, url, folder, seed):
        self.notes = folder / f"notes-{seed}"
        self.process = subprocess.Popen([sys.executable, __file__, "client", url, str(self.notes), str(seed)])

    @property
    def has_begun(self):
        """It takes a while until all is imported; nothing is learnt from killing it before."""
        return self.notes.exists() and self.notes.stat().st_size > 0

    def kill(self):
        """Returns when it is gone."""
        self.process.kill()
        self.process.wait()


def soak(checkpoint, seconds, folder, port):
    """Run; returns what was found."""
    rng = random.Random(0)
    storage = folder / "store"
    storage.mkdir()
    server, clients = Server(checkpoint, storage, port), []
    try:
        server.start()
        found = _run(server, clients, seconds, folder, rng)
    finally:
        for one in clients:
            one.kill()
        if server.process.poll() is None:
            server.process.kill()
    return {**found, **look_through(storage, folder, found)}


def _run(server, clients, seconds, folder, rng):
    found = {"seconds": seconds, "kills": 0, "killed_server": None, "resident_mib": []}
    restart_at = time.monotonic() + seconds / 2
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or found["kills"] < LEAST_KILLS or _num_verified(folder) < LEAST_VERIFIED:
        while len(clients) < NUM_CLIENTS:
            clients.append(Client(server.url, folder, rng.randrange(1 << 20)))
        time.sleep(rng.uniform(0.5, 2.5))
        victims = [one for one in clients if one.has_begun]
        if victims:
            victim = rng.choice(victims)
            clients.remove(victim)
            victim.kill()
            found["kills"] += 1
        found["resident_mib"].append(resident_bytes(server.process.pid) >> 20)
        if found["killed_server"] is None and time.monotonic() > restart_at:
            found["killed_server"] = server.process.pid
            away = time.time()
            server.end(signal.SIGKILL)
            server.start()
            found["away"] = [away, time.time()]
    for one in clients:
        one.kill()
    clients.clear()
    found["ended"] = time.time()
    server.end(signal.SIGTERM)
    return {**found, "exit": server.process.returncode}


def _notes(folder):
    lines = [line for path in folder.glob("notes-*") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _num_verified(folder):
    return sum("verified" in note for note in _notes(folder))


def resident_bytes(pid):
    """Memory of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def look_through(storage, folder, ran):
    """What is in the store, against what clients noted."""
    now, notes = time.time(), _notes(folder)
    deleted = {note["deleted"] for note in notes if "deleted" in note}
    found = {"verified": sum("verified" in note for note in notes), "wrong": [n for n in notes if "wrong" in n]}
    first, last = ran["away"]
    errors = [(first <= note["at"] <= last + _BACK_SECONDS, note["error"]) for note in notes if "error" in note]
    found["errors"] = sorted({error for while_away, error in errors if while_away})
    found["unexplained"] = sorted({error for while_away, error in errors if not while_away})
    found["temporaries"] = [path.name for path in storage.iterdir() if path.name.endswith(".layertap-tmp")]
    found["old"] = [
        path.name for path in storage.iterdir()
        if path.is_file() and ran["ended"] - path.stat().st_mtime > _REAPED_AFTER_SECONDS + TTL_SECONDS
    ]  # fmt: skip
    found["files"], found["broken"], found["lost"] = 0, [], []
    for path in storage.glob("*.safetensors"):
        try:
            read_file(path, timeout=5)
            found["files"] += 1
        except HiddenStatesError as exc:
            found["broken"].append(f"{path.name}: {exc}")
    for note in notes:
        path = note.get("told")
        if path is None or path in deleted or now - note["at"] > TTL_SECONDS - 5:
            continue
        if not any(Path(path + suffix).exists() for suffix in ("", ".error", ".lock")):
            found["lost"].append(path)
    return found


def main():
    """The command line."""
    if sys.argv[1:2] == ["client"]:
        client(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    from layertap.testing import zoo

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1800.0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = sys.argv[2] if len(sys.argv) > 2 else zoo.save("llama", folder)
        found = soak(checkpoint, seconds, Path(folder), free_port())
    found["resident_mib"] = found["resident_mib"][:: max(1, len(found["resident_mib"]) // 30)]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
