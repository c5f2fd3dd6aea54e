"""A server that runs on while its clients are killed, and is itself: nothing lost, nothing left, nothing unverified.

Run as: python tests/serving/soak.py [SECONDS] [CHECKPOINT]

Client processes ask, fetch, verify and note what they verified; some are killed at random moments. Half-way the server is killed
(SIGKILL) and started again on the same store. In the end the store is looked through: no temporary file, nothing older than its
time to live, every file that is there complete, and every file that a client was told of and that has not expired is there or says
why not.
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

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, LayertapError
from layertap.files.read import read_file

TTL_SECONDS = 20.0
NUM_CLIENTS = 4


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
                log.write(json.dumps({"error": f"{type(exc).__name__}: {exc}"}) + "\n")
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
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=environment)
        for line in self.process.stderr:
            if " serving " in line:
                threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()
                return
        raise RuntimeError("the server didn't start")

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(120)


def soak(checkpoint, seconds, folder, port):
    """Run; returns what was found."""
    rng = random.Random(0)
    storage = folder / "store"
    storage.mkdir()
    server = Server(checkpoint, storage, port)
    server.start()
    clients, kills, killed = [], 0, None
    deadline = time.monotonic() + seconds
    restart_at = time.monotonic() + seconds / 2
    sizes = []
    while time.monotonic() < deadline:
        while len(clients) < NUM_CLIENTS:
            seed = rng.randrange(1 << 20)
            arguments = [sys.executable, __file__, "client", server.url, str(folder / f"notes-{seed}"), str(seed)]
            clients.append(subprocess.Popen(arguments))
        time.sleep(rng.uniform(0.5, 2.5))
        victim = clients.pop(rng.randrange(len(clients)))
        victim.kill()
        victim.wait()
        kills += 1
        sizes.append(resident_bytes(server.process.pid))
        if restart_at is not None and time.monotonic() > restart_at:
            restart_at = None
            killed = server.process.pid
            server.end(signal.SIGKILL)
            server.start()
    for one in clients:
        one.kill()
        one.wait()
    server.end(signal.SIGTERM)
    found = {"seconds": seconds, "kills": kills, "killed_server": killed, "exit": server.process.returncode}
    return {**found, "resident_mib": [size >> 20 for size in sizes], **look_through(storage, folder)}


def resident_bytes(pid):
    """Memory of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def look_through(storage, folder):
    """What is in the store, against what clients noted."""
    now = time.time()
    notes = [
        json.loads(line)
        for path in folder.glob("notes-*")
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    deleted = {note["deleted"] for note in notes if "deleted" in note}
    found = {"verified": sum("verified" in note for note in notes), "wrong": [n for n in notes if "wrong" in n]}
    found["errors"] = sorted({note["error"][:400] for note in notes if "error" in note})
    found["temporaries"] = [path.name for path in storage.iterdir() if path.name.endswith(".layertap-tmp")]
    found["old"] = [
        path.name for path in storage.iterdir()
        if path.is_file() and now - path.stat().st_mtime > TTL_SECONDS + 15
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


def free_port():
    """A port that was free just now."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


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
