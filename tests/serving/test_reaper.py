"""Nobody has to clean up, and nothing that is needed goes."""

import fcntl
import os
import time

import httpx
import pytest
from captures import HandCapture
from waiting import wait_until_at_rest

from layertap import load_hidden_states
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings

LATER = 4000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reaped")


@pytest.fixture(scope="module")
def own(make_llm, folder):
    (folder / ".left.safetensors.0.layertap-tmp").write_bytes(b"x" * 10)
    (folder / "model.safetensors").write_bytes(b"weights")
    llm = make_llm(folder, ttl_seconds=3600.0, max_storage_bytes=200_000)
    with run_background(llm.front, ServerSettings(served_model_names=("tiny",), reap_seconds=3600)) as running:
        yield running


def post(own, **body):
    return httpx.post(f"{own.url}/v1/completions", json={"prompt": "a few words", "max_tokens": 1, **body}, timeout=60)


def test_leftovers_of_a_dead_process_are_gone_after_the_start(own, folder):
    assert not (folder / ".left.safetensors.0.layertap-tmp").exists()


def test_expired_files_and_tags_go_and_everything_else_stays(own, folder):
    answer = post(own, kv_transfer_params={"tag": "short"}).json()
    path = answer["kv_transfer_params"]["hidden_states_path"]
    load_hidden_states(path)
    busy = HandCapture(own.state.front, "busy")
    failed = HandCapture(own.state.front, "failed")
    failed.fail("a reason")
    (folder / "mine.txt").write_text("mine")
    own.state.reaper.round()
    assert os.path.exists(path)
    own.state.reaper.round(now=time.time() + LATER)
    left = set(os.listdir(folder))
    assert {"mine.txt", "model.safetensors", "busy.safetensors.lock"} <= left
    assert not {os.path.basename(path), "failed.safetensors.error"} & left
    assert httpx.get(f"{own.url}/v1/hidden_states/tags/short").status_code == 404
    assert httpx.get(f"{own.url}/v1/hidden_states/{answer['id']}").status_code == 404
    busy.publish()


def test_a_file_being_read_outlives_its_time(own):
    path = HandCapture(own.state.front, "read").publish()
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        own.state.reaper.round(now=time.time() + LATER)
        assert path.exists()
    own.state.reaper.round(now=time.time() + LATER)
    assert not path.exists()


def test_files_of_other_processes_without_a_time_to_live_are_left_alone(own, make_llm, folder):
    path = HandCapture(make_llm(folder).front, "offline").publish()
    own.state.reaper.round(now=time.time() + 1e9)
    load_hidden_states(path)
    path.unlink()


def test_a_full_store_is_507_before_anything_runs_and_delivered_files_make_room(own, folder):
    own.state.reaper.round(now=time.time() + LATER)
    delivered = post(own).json()["id"]
    wait_until_at_rest(own)
    body = {
        "prompt": "x" * 100,
        "max_tokens": 120,
        "ignore_eos": True,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    names = []
    while (answer := post(own, **body)).status_code == 200:
        names.append(answer.json()["id"])
        assert len(names) < 10
        wait_until_at_rest(own)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "store_full")
    assert "max_storage_bytes allows 200000" in answer.json()["error"]["message"]
    assert own.state.front.num_running == 0
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    for name in (delivered, names[0]):
        assert httpx.get(f"{own.url}/v1/hidden_states/{name}").status_code == 200
    assert post(own, **body).status_code == 200
    assert httpx.get(f"{own.url}/v1/hidden_states/{names[0]}").status_code == 404
    for name in names[1:]:
        assert httpx.get(f"{own.url}/v1/hidden_states/{name}").status_code == 200


def test_a_round_that_fails_is_logged_and_the_next_one_works(own, folder, caplog):
    moved = folder.with_name("moved")
    folder.rename(moved)
    folder.write_bytes(b"no folder")
    own.state.reaper.round()
    folder.unlink()
    moved.rename(folder)
    HandCapture(own.state.front, "after").publish()
    assert own.state.reaper.round(now=time.time() + LATER).expired
