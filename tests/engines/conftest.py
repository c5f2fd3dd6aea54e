"""What tests of Triton kernels share."""

import os
import subprocess
import sys

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"])
def assert_equal(request):
    """Runs a script that gets a device and prints "equal", on CUDA and through Triton's interpreter.

    In a process of its own, since Triton reads the variable once.
    """
    pytest.importorskip("triton", reason="the kernel is Triton's")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if request.param == "cpu" else {})}

    def run(script):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, request.param],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.stdout.strip() == "equal", done.stderr

    return run
