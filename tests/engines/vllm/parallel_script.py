"""Several worker processes; their files, and then one worker is killed under a running request.

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


def kill(llm, storage, rank):
    """Kill the worker of this rank, with a reader that waits already for each of four requests."""
    engine = llm.llm_engine
    targets = [storage / f"killed-{index}.safetensors" for index in range(4)]
    for index, (target, prompt) in enumerate(zip(targets, running.prompts([30, 9, 60, 5], seed=9), strict=True)):
        sampling = running.params(180, include_output_tokens=True, hidden_states_path=str(target))
        engine.add_request(f"killed-{index}", prompt, sampling)
    locks = [target.with_name(f"{target.name}.lock") for target in targets]
    while not all(lock.exists() and lock.stat().st_size for lock in locks):
        engine.step()
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
    return {
        "engine": ended,
        "readers": said,
        "workers": sorted(workers.values()),
        "left": sorted(set(processes) - set(gone(processes))),
        "temporary": [path.name for path in storage.rglob("*") if path.name.endswith(".layertap-tmp")],
    }


def main(asked):
    storage = Path(asked["storage"])
    extra = {"prefix_rows_bytes": 10_000_000, "allow_custom_save_path": True, "min_free_bytes": 0}
    with running.running(Path(asked["checkpoint"]), storage, extra, **asked["options"]) as llm:
        found = ask(llm)
        if asked["kill"] is not None:
            found["killed"] = kill(llm, storage, asked["kill"])
            print("\nRESULT", json.dumps(found), flush=True)
            os._exit(0)  # nothing is left to be shut down
    print("\nRESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
