"""Two replicas behind one front end, with layertap's connector inside of MultiConnector; then one engine process is killed.

Run by test_replicas as `python replicas_script.py CHECKPOINT STORAGE`; prints one line of JSON, `RESULT {...}`.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import running


def told(path):
    """What a reader of `path` gets, waiting as long as it takes."""
    from layertap import load_hidden_states
    from layertap.errors import HiddenStatesError

    try:
        load_hidden_states(path, timeout=120)
    except HiddenStatesError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "rows"


async def last(engine, name, prompt, sampling):
    outputs = [output async for output in engine.generate(prompt, sampling, name)]
    return outputs[-1]


async def ask(engine):
    asked = running.prompts([5, 90, 33, 120, 17, 64, 40, 8])
    wanted = [running.params(7, include_output_tokens=True, others_question=i) for i in range(len(asked))]
    outputs = await asyncio.gather(
        *(last(engine, f"r{i}", *pair) for i, pair in enumerate(zip(asked, wanted, strict=True)))
    )
    return [[[*output.prompt_token_ids, *output.outputs[0].token_ids], output.kv_transfer_params] for output in outputs]


def engine_pids(engine):
    return [process.pid for process in engine.engine_core.resources.engine_manager.processes]


async def kill(engine, storage):
    """Kill the engine processes under a running request, with a reader that waits already."""
    target = storage / "killed.safetensors"
    request = asyncio.create_task(
        last(engine, "killed", running.prompts([30], seed=9)[0],
             running.params(200, include_output_tokens=True, hidden_states_path=str(target)))
    )  # fmt: skip
    lock = target.with_name(target.name + ".lock")
    while not (lock.exists() and lock.stat().st_size):
        await asyncio.sleep(0.005)
    writer = json.loads(lock.read_text())["holder"]["pid"]
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(told, target)
        victims = engine_pids(engine)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        try:
            await request
            ended = "finished"
        except Exception as exc:  # noqa: BLE001 - whatever the engine says
            ended = type(exc).__name__
        said = await asyncio.wrap_future(reader)
    fd = None
    try:
        fd = os.pidfd_open(writer)
    except ProcessLookupError:
        gone = True
    else:
        import select

        poll = select.poll()
        poll.register(fd, select.POLLIN)
        gone = bool(poll.poll(60_000))
    return {"request": ended, "reader": said, "writer_is_the_engine": writer in victims, "writer_gone": gone}


async def main(checkpoint, storage):
    from prometheus_client import generate_latest
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    ours = {
        "kv_connector": "HiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "layers": "all", "shared_storage_path": str(storage), "allow_custom_save_path": True, "min_free_bytes": 0,
            "num_writer_processes": 2,
        },
    }  # fmt: skip
    other = {"kv_connector": "OtherConnector", "kv_connector_module_path": "other_connector", "kv_role": "kv_both"}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(checkpoint),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            seed=0,
            data_parallel_size=2,
            kv_transfer_config=KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": [other, ours]},
            ),
        )
    )
    found = {"answers": await ask(engine)}
    await ask_again(engine)
    found["metrics"] = [
        line
        for line in generate_latest().decode().splitlines()
        if line.startswith("layertap:") and "created" not in line
    ]
    found["killed"] = await kill(engine, storage)
    print("\nRESULT", json.dumps(found), flush=True)
    threading.Timer(60, os._exit, (3,)).start()
    engine.shutdown()
    os._exit(0)


async def ask_again(engine):
    """Reports come with a step: let each replica make some after the files were published."""
    for number in range(4):
        await asyncio.gather(
            *(last(engine, f"again{number}-{i}", prompt, running.params(3, capture=False))
              for i, prompt in enumerate(running.prompts([4, 4, 4, 4], seed=number)))
        )  # fmt: skip
        await asyncio.sleep(0.6)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
