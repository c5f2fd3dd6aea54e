"""vLLM's server as a process of its own: `layertap serve --engine vllm`, or its own command line."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from ports import free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "vllm"))

LAYERTAP = [sys.executable, "-c", "from layertap.cli import main; main()", "serve"]
STOCK = [sys.executable, "-m", "layertap.serving.vllm_main", "serve"]
SMALL = [
    "--max_model_len", "256", "--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--enforce-eager",
]  # fmt: skip


@contextmanager
def vllm_serving(command, *arguments, environment=None):
    """A server that answers; yields its address and its process."""
    import running

    port = free_port()
    process = subprocess.Popen(
        [*command, *arguments, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **running.ENVIRONMENT, **(environment or {})},
    )
    log, ready = [], threading.Event()

    def read():
        for line in process.stdout:
            log.append(line)
            if "Application startup complete" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(400)
        assert any("Application startup complete" in line for line in log), "".join(log[-40:])
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            reader.join()
