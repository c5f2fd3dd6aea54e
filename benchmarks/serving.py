"""How fast does a client have the rows of its answer in hand, and does the server stay flat under load?

A real server process with a tiny model, so that the server is measured and not the model. Closed loop: each of N clients asks (64
prompt tokens, 16 generated, include_output_tokens, layers 1, 2, 4), gets its answer, fetches the file and checks every byte, asks
again. Two numbers matter: the p50 of the answer (generation, which is queueing once N exceeds what the engine runs at once), and
the p99 of the hand-over: from the answer in the client to verified rows in the client. By path on one machine, and by HTTP.

A last round has readers that take ten times as long as the server needs: nothing may grow but the number of files.

With --slow-readers only this: 16 clients ask as fast as they are answered, and 4 readers take the files (0.3 MiB each, by HTTP,
none deleted) at 160 KiB/s each, in a store of 16 MiB and with at most 1 MiB of rows in memory. Every half second it looks at what
the server holds: rows in memory, bytes in the store, its own memory. What doesn't fit is a 507 before anything is generated, and is
asked again.

Run as: python benchmarks/serving.py [--seconds 10] [--clients 1,8,64,256] [--slow-readers]
"""

import argparse
import asyncio
import collections
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from layertap.client import AsyncHiddenStatesClient, ServerError
from layertap.testing import zoo

PROMPT = list(range(8, 72))
BODY = {
    "max_tokens": 16,
    "ignore_eos": True,
    "return_token_ids": True,
    "kv_transfer_params": {"include_output_tokens": True},
}


def start(checkpoint, storage, *more):
    """A server; returns its process and address."""
    command = [
        sys.executable, "-c", "from layertap.cli import main; main()", "serve", str(checkpoint), "--port", "0", "--layers",
        "1,2,4", "--storage", str(storage), "--ttl-seconds", "30", "--min-free-bytes", "0", "--allow-delete",
        "--max-num-seqs", "64", *more,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if " serving " in line:
            return process, line.split()[-1]
    raise SystemExit("the server didn't start")


def resident_mib(pid):
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def quantile(values, part):
    """Of a list that isn't empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def one_client(client, until, answers, handovers, errors, pause):
    while time.monotonic() < until:
        try:
            began = time.monotonic()
            answer = await client.complete(PROMPT, **BODY)
            answered = time.monotonic()
            (choice,) = answer["choices"]
            await asyncio.sleep(pause)
            loading = time.monotonic()
            loaded = await client.fetch_raw(choice)
            done = time.monotonic()
            if loaded.token_ids.tolist() != (choice["prompt_token_ids"] + choice["token_ids"])[:-1]:
                raise ValueError("the file isn't of this request")
            answers.append(answered - began)
            handovers.append(done - loading if pause else done - answered)
            await client.delete(choice)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is counted and shown
            errors.append(f"{type(exc).__name__}: {exc}")


async def measure(url, pid, num_clients, seconds, local, pause=0.0):
    answers, handovers, errors = [], [], []
    async with AsyncHiddenStatesClient(url, local=local) as client:
        before = resident_mib(pid)
        began = time.monotonic()
        until = began + seconds
        await asyncio.gather(
            *(one_client(client, until, answers, handovers, errors, pause) for _ in range(num_clients))
        )
        took = time.monotonic() - began
    return {
        "clients": num_clients,
        "by": "path" if local else "http",
        "slow_readers": pause > 0,
        "requests": len(answers),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "requests_per_second": round(len(answers) / took, 1),
        "answer_p50_ms": round(1e3 * quantile(answers, 0.5), 1),
        "answer_p99_ms": round(1e3 * quantile(answers, 0.99), 1),
        "handover_p50_ms": round(1e3 * quantile(handovers, 0.5), 1),
        "handover_p99_ms": round(1e3 * quantile(handovers, 0.99), 1),
        "server_mib_before": round(before),
        "server_mib_after": round(resident_mib(pid)),
    }


SLOW_STORE_BYTES, SLOW_ROWS_BYTES, SLOW_READERS, ASKING = 16 << 20, 1 << 20, 4, 16
SLOW_BODY = {
    "prompt": list(range(8, 208)),
    "max_tokens": 40,
    "ignore_eos": True,
    "kv_transfer_params": {"include_output_tokens": True, "layers": "all"},
}


async def ask(client, until, counts, made):
    while time.monotonic() < until:
        try:
            answer = await client.complete(**SLOW_BODY)
        except ServerError as exc:
            if exc.status != 507:
                raise
            counts["refused_507"] += 1
            await asyncio.sleep(0.2)
            continue
        counts["answered"] += 1
        made.append(answer["id"])


async def read_slowly(http, until, counts, made):
    while time.monotonic() < until:
        if not made:
            await asyncio.sleep(0.05)
            continue
        async with http.stream("GET", f"/v1/hidden_states/{made.popleft()}", params={"wait": 30}) as file:
            counts["gone"] += file.status_code != 200
            async for chunk in file.aiter_raw(16 << 10):
                counts["read_bytes"] += len(chunk)
                await asyncio.sleep(0.1)
        counts["read"] += 1


async def sample(http, pid, until, found):
    names = ("bytes_in_flight", "store_used_bytes", "store_reserved_bytes", "backpressure_seconds_total")
    while time.monotonic() < until:
        text = (await http.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        found.append([float(values[f"layertap_{name}"]) for name in names] + [resident_mib(pid)])
        await asyncio.sleep(0.5)


async def measure_slow(url, pid, seconds):
    counts = dict.fromkeys(("answered", "refused_507", "read", "read_bytes", "gone"), 0)
    found = []
    limits = httpx.Limits(max_connections=None)
    async with (
        AsyncHiddenStatesClient(url, local=False) as client,
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http,
    ):
        began = time.monotonic()
        until = began + seconds
        made = collections.deque()
        readers = [read_slowly(http, until, counts, made) for _ in range(SLOW_READERS)]
        asking = [ask(client, until, counts, made) for _ in range(ASKING)]
        await asyncio.gather(sample(http, pid, until, found), *readers, *asking)
        took = time.monotonic() - began
    third = max(1, len(found) // 3)
    return {
        **counts,
        "seconds": round(took, 1),
        "rows_in_memory_most": max(int(row[0]) for row in found),
        "rows_in_memory_limit": SLOW_ROWS_BYTES,
        "store_most": max(int(row[1]) for row in found),
        "store_most_with_reserved": max(int(row[1] + row[2]) for row in found),
        "store_limit": SLOW_STORE_BYTES,
        "engine_waited_for_writers_seconds": round(found[-1][3], 2),
        "server_mib": [
            round(max(row[4] for row in part)) for part in (found[:third], found[third:-third], found[-third:])
        ],
    }


def slow_readers(seconds):
    """Readers slower than the engine."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        limits = ["--max-storage-bytes", str(SLOW_STORE_BYTES), "--max-bytes-in-flight", str(SLOW_ROWS_BYTES)]
        limits += ["--ttl-seconds", "none"]
        process, url = start(zoo.save("llama", Path(folder)), Path(folder) / "store", *limits)
        try:
            print(json.dumps({"benchmark": "slow readers", **asyncio.run(measure_slow(url, process.pid, seconds))}))
        finally:
            process.terminate()
            process.wait(120)


def main():
    """Run all rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", default="1,8,64,256")
    parser.add_argument("--slow-readers", action="store_true", help="only readers slower than the engine")
    options = parser.parse_args()
    if options.slow_readers:
        slow_readers(options.seconds)
        return
    counts = [int(count) for count in options.clients.split(",")]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        process, url = start(zoo.save("llama", Path(folder)), Path(folder) / "store")
        results = []
        try:
            asyncio.run(measure(url, process.pid, max(counts), 3.0, local=True))  # warm-up
            for local in (True, False):
                for count in counts:
                    results.append(asyncio.run(measure(url, process.pid, count, options.seconds, local)))
                    report(results[-1])
            slow = asyncio.run(measure(url, process.pid, 64, options.seconds, local=False, pause=1.0))
            results.append(slow)
            report(slow)
        finally:
            process.terminate()
            process.wait(120)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "serving", **machine, "seconds": options.seconds, "rounds": results}))


def report(row):
    """One line a round."""
    print(
        f"{row['clients']:4d} clients by {row['by']}{' (slow readers)' if row['slow_readers'] else ''}: "
        f"{row['requests_per_second']:7.1f} requests/s, answer p50 {row['answer_p50_ms']:8.1f} ms, hand-over p50 "
        f"{row['handover_p50_ms']:6.1f} ms, p99 {row['handover_p99_ms']:6.1f} ms, errors {row['errors']}, server "
        f"{row['server_mib_before']} to {row['server_mib_after']} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
