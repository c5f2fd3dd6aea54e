"""Kill writers, readers, extract jobs, servers and clients with SIGKILL at random moments, and look at what is left.

Run as: python tests/faults/kills.py [--rounds 1000] [--seed 0] [--only writer,reader,job,server,client | vllm | vllm-server]

`--only vllm`, where vLLM is installed, kills its engine, writer and readers, and gives the writer bad disks. `--only vllm-server`
starts its HTTP server once a round, kills eight clients, and then one of the server's processes.

Prints one line of figures for each kind of victim and one for all. Rows that are wrong, readers that hang and files that stay
behind must be zero; the exit code says so. Victims are forked from this process, which has all imports and self-tests done.
"""

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "files"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "vllm"))

from victims import Figures

KINDS: dict[str, tuple[float, str, str]] = {
    "writer": (0.4, "kill_writer", "run"),
    "reader": (0.2, "kill_reader", "run"),
    "job": (0.15, "kill_job", "run"),
    "server": (0.1, "kill_server", "run_server_kills"),
    "client": (0.15, "kill_server", "run_client_kills"),
}
"""Share of the rounds, module and function: imported when it is its turn, since the vLLM engine's needs less than all of them."""


VLLM = {"vllm": "kill_vllm", "vllm-server": "kill_vllm_server"}


def run_vllm(name: str, rounds: int, seed: int) -> int:
    """All kinds of victims of the vLLM engine, or of its server."""
    total = Figures()
    for kind, figures in importlib.import_module(VLLM[name]).run_all(rounds, seed):
        print(json.dumps({"victim": f"{name} {kind}", **asdict(figures)}), flush=True)
        total += figures
    print(json.dumps({"victim": f"{name} all", **asdict(total)}))
    return 0 if total.faultless else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS))
    arguments = parser.parse_args()
    kinds = arguments.only.split(",")
    if len(kinds) == 1 and kinds[0] in VLLM:
        return run_vllm(kinds[0], arguments.rounds, arguments.seed)
    whole = sum(KINDS[kind][0] for kind in kinds)
    total = Figures()
    for kind in kinds:
        share, module, name = KINDS[kind]
        run = getattr(importlib.import_module(module), name)
        began = time.monotonic()
        figures = run(round(arguments.rounds * share / whole), arguments.seed)
        seconds = round(time.monotonic() - began, 1)
        print(json.dumps({"victim": kind, **asdict(figures), "seconds": seconds}), flush=True)
        total += figures
    print(json.dumps({"victim": "all", **asdict(total)}))
    return 0 if total.faultless else 1


if __name__ == "__main__":
    sys.exit(main())
