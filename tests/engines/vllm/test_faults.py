"""Disks that are full, folders that can't be written to, a writer process that dies: the engine goes on, every reader is told."""

import os
import signal
import subprocess

import checkpoints
import pytest
import running
from running import check_file, params, prompts

from layertap import load_hidden_states
from layertap.errors import HiddenStatesError


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    os.environ["LAYERTAP_VLLM_WRITER"] = "process"
    try:
        with running.running(
            checkpoint,
            tmp_path_factory.mktemp("states"),
            {"allow_custom_save_path": True, "min_free_bytes": 0},
            block_size=32,
        ) as engine:
            yield engine
    finally:
        del os.environ["LAYERTAP_VLLM_WRITER"]


def generate(llm, inputs, sampling):
    return llm.generate(inputs, sampling, use_tqdm=False)


def test_a_full_disk_fails_the_requests_it_hits_and_no_other(llm, checkpoint, small_disk):
    model = running.load_oracle("llama", checkpoint)
    asked = prompts([200] * 6, seed=1)
    outputs = generate(
        llm, asked, [params(2, hidden_states_path=str(small_disk / f"{i}.safetensors")) for i in range(len(asked))]
    )
    reasons = []
    for output in outputs:
        try:
            load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=30)
        except HiddenStatesError as exc:
            reasons.append(str(exc))
    assert reasons
    assert all("No space left" in reason or "no room" in reason for reason in reasons)
    good = generate(llm, prompts([30], seed=2), params(4, include_output_tokens=True))[0]
    tokens = [*good.prompt_token_ids, *good.outputs[0].token_ids]
    check_file(model, good.kv_transfer_params["hidden_states_path"], tokens[:-1])


def test_a_dead_writer_process_is_told_to_readers_and_the_engine_goes_on(llm, tmp_path):
    from layertap.engines.vllm import worker

    (tap,) = worker._taps.values()
    engine = llm.llm_engine
    target = tmp_path / "killed.safetensors"
    engine.add_request(
        "killed", prompts([20], seed=3)[0], params(40, include_output_tokens=True, hidden_states_path=str(target))
    )
    for _ in range(3):
        engine.step()
    os.kill(tap.unpacker.pid, signal.SIGKILL)
    tap.unpacker._receiver.join(30)
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(HiddenStatesError, match="died"):
        load_hidden_states(target, timeout=30)
    after = generate(llm, prompts([9], seed=4), params(2))[0]
    assert len(after.outputs[0].token_ids) == 2
    with pytest.raises(HiddenStatesError, match="died"):
        load_hidden_states(after.kv_transfer_params["hidden_states_path"], timeout=30)
    assert tap.tap.host_ring.used == 0
