"""Several worker processes; their files, and then one worker is killed under running requests; the same for others, an engine each.

Run by test_parallel as `python parallel_script.py OPTIONS`, a JSON object; prints one line of JSON, `RESULT {...}`.
"""

import json
import os
import select
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import running

from layertap.files.reap import reap


def children(pid):
    """Living children of a process, by id, with their command line."""
    found = {}
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
    return found


def told(path):
    """What a reader of `path` gets, waiting as long as it takes."""
    from layertap import load_hidden_states
    from layertap.errors import HiddenStatesError

    try:
        load_hidden_states(path, timeout=120)
    except HiddenStatesError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "rows"


def gone(pids):
    """Those of these processes that end within a minute."""
    ended = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            ended.append(pid)
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if poll.poll(60_000):
            ended.append(pid)
        os.close(fd)
    return ended


def ask(llm):
    outputs = []
    for _ in range(2):  # the second time with rows that were kept
        outputs += llm.generate(
            running.prompts([5, 90, 33, 120]),
            [
                running.params(7, include_output_tokens=True),
                running.params(7, include_output_tokens=True, layers=[4, 0, 2]),
                running.params(1, layers=[1], positions="last"),
                running.params(3, positions=[2, 70]),
            ],
            use_tqdm=False,
        )
    return {
        "tokens": [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs],
        "handles": [o.kv_transfer_params for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
    }


def temporary_files(storage):
    return sorted(path.name for path in storage.rglob("*") if path.name.endswith(".layertap-tmp"))


def kill(llm, storage, rank):
    """Kill the worker of this rank, with a reader that waits already for each of four requests, while a fifth is published."""
    engine = llm.llm_engine
    done, *targets = [storage / f"killed-{rank}-{index}.safetensors" for index in range(5)]
    for target, prompt, length in zip(
        [done, *targets], running.prompts([40, 30, 9, 60, 5], seed=9), [2, 180, 180, 180, 180], strict=True
    ):
        sampling = running.params(length, include_output_tokens=True, hidden_states_path=str(target))
        engine.add_request(target.name, prompt, sampling)
    locks = [target.with_name(f"{target.name}.lock") for target in targets]
    tokens = None
    while tokens is None or not all(lock.exists() and lock.stat().st_size for lock in locks):
        for output in engine.step():
            if output.finished:
                tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    writer = json.loads(locks[0].read_text())["holder"]["pid"]
    (core,) = engine.engine_core.resources.engine_manager.processes
    workers = {pid: name for pid, name in children(core.pid).items() if "Worker" in name}
    (victim,) = [pid for pid, name in workers.items() if f"P{rank}" in name]
    with ThreadPoolExecutor(len(targets)) as pool:
        readers = [pool.submit(told, target) for target in targets]
        os.kill(victim, signal.SIGKILL)
        ended = "finished"
        try:
            while engine.has_unfinished_requests():
                engine.step()
        except Exception as exc:  # noqa: BLE001 - whatever the engine says
            ended = type(exc).__name__
        said = [reader.result() for reader in readers]
    processes = [*workers, core.pid, writer]
    left = sorted(set(processes) - set(gone(processes)))
    temporary = temporary_files(storage)
    reap(storage)
    return {
        "engine": ended,
        "readers": said,
        "done": {"path": str(done), "tokens": tokens, "said": told(done)},
        "workers": sorted(workers.values()),
        "left": left,
        "temporary": temporary,
        "not_cleaned": temporary_files(storage),
    }


def main(asked):
    storage = Path(asked["storage"])
    extra = {"prefix_rows_bytes": 10_000_000, "allow_custom_save_path": True, "min_free_bytes": 0}
    found = {}
    for victim in asked["kill"] or [None]:
        with running.running(Path(asked["checkpoint"]), storage, extra, **asked["options"]) as llm:
            if not found:
                found = {**ask(llm), "killed": []}
            if victim is not None:
                found["killed"].append(kill(llm, storage, victim))
    print("\nRESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
