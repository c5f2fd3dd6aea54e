"""`layertap serve` as a process of its own."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager


@contextmanager
def serving(*arguments, command="serve"):
    """A `layertap serve` (or `serve-files`) that answers; yields its address, process and log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", "from layertap.cli import main; main()", command, *arguments, "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    log, ready = [], threading.Event()

    def read():
        for line in process.stderr:
            log.append(line)
            if " serving " in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(300)
        found = [line for line in log if " serving " in line]
        assert found, "".join(log)
        yield found[0].split()[-1], process, log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
        reader.join()
        process.stderr.close()
