"""A pipeline over two machines: two network namespaces with an address each, joined by a cable of their own.

`python tests/engines/vllm/two_machines.py` (as root, Linux, with `ip`) starts stock vLLM in both, one stage each; the second
stage's rows go over TCP into the first one's files. It checks every file against the oracle and prints one line of JSON. Not a test
of the suite: it takes minutes, and changes the network.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import running

NAMES = ("layertap-a", "layertap-b")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
CABLE = ("layertap-va", "layertap-vb")
PORT = 8123
ASKING = """
import json, sys, urllib.request
def ask(body):
    request = urllib.request.Request({url!r}, json.dumps(body).encode(), {{"content-type": "application/json"}})
    return json.loads(urllib.request.urlopen(request, timeout=200).read())
print(json.dumps([ask(body) for body in json.load(sys.stdin)]))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Made, and taken away again."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for name, end, address in zip(NAMES, CABLE, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def start(rank: int, checkpoint: Path, folder: Path) -> subprocess.Popen[bytes]:
    """One machine's vLLM."""
    connector = {
        "kv_connector": "HiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"layers": "all", "shared_storage_path": str(folder / "states")},
    }
    command = [
        *(
            "ip",
            "netns",
            "exec",
            NAMES[rank],
            sys.executable,
            "-m",
            "layertap.serving.vllm_main",
            "serve",
            str(checkpoint),
        ),
        *("--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", ADDRESSES[0]),
        *(
            "--served-model-name",
            "tiny",
            "--max-model-len",
            "256",
            "--max-num-batched-tokens",
            "64",
            "--dtype",
            "float32",
        ),
        *("--kv-transfer-config", json.dumps(connector)),
        *(["--host", ADDRESSES[0], "--port", str(PORT)] if rank == 0 else ["--headless"]),
    ]
    environment = {
        **os.environ,
        **running.ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": ADDRESSES[rank],
        "GLOO_SOCKET_IFNAME": CABLE[rank],
        "VLLM_CACHE_ROOT": str(folder / f"cache-{rank}"),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def wait_until_ready(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    log = folder / "log-0"
    while b"Application startup complete" not in log.read_bytes():
        for rank, process in enumerate(processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                raise SystemExit(f"machine {rank} ended:\n{(folder / f'log-{rank}').read_text()[-4000:]}")


def ask(prompts: list[list[int]]) -> list[dict[str, Any]]:
    bodies = [
        {"model": "tiny", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True,
         "kv_transfer_params": {"include_output_tokens": True}}
        for prompt in prompts
    ]  # fmt: skip
    code = ASKING.format(url=f"http://{ADDRESSES[0]}:{PORT}/v1/completions")
    done = subprocess.run(
        ["ip", "netns", "exec", NAMES[0], sys.executable, "-c", code],
        input=json.dumps(bodies).encode(), capture_output=True, check=True,
    )  # fmt: skip
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="layertap-machines-"))
    checkpoint = checkpoints.save("llama", folder)
    prompts = [prompt["prompt_token_ids"] for prompt in running.prompts([5, 90, 33, 120, 64], seed=4)]
    with two_namespaces():
        processes = [start(rank, checkpoint, folder) for rank in range(2)]
        try:
            wait_until_ready(processes, folder)
            answers = ask(prompts)
            seen = subprocess.run(
                ["ip", "netns", "exec", NAMES[1], "ss", "-Htnp"], capture_output=True, text=True, check=False
            ).stdout
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                process.wait(120)
    model = running.load_oracle("llama", checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        (choice,) = answer["choices"]
        path = answer["kv_transfer_params"]["hidden_states_path"]
        running.check_file(model, path, [*prompt, *choice["token_ids"]][:-1])
    print(json.dumps({"files": len(answers), "folder": str(folder), "tcp connections": len(seen.splitlines())}))


if __name__ == "__main__":
    main()
