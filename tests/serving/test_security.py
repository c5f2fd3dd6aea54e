"""What a client may not do, seen from outside: where its files go, who may read them, what is written where."""

import inspect
import os
import secrets
import stat
from pathlib import Path

import httpx
import pytest
from captures import HandCapture
from waiting import wait_until_at_rest

from layertap.cli.serve import serve as serve_command
from layertap.cli.serve_files import serve_files
from layertap.serving.launch import ServeOptions
from layertap.serving.listening import is_loopback
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("security")
    for name in ("store", "allowed", "outside"):
        (made / name).mkdir()
    (made / "allowed" / "link").symlink_to(made / "outside")
    (made / "outside" / "file").write_text("precious")
    (made / "allowed" / "file-link").symlink_to(made / "outside" / "file")
    return made


@pytest.fixture(scope="module")
def guarded(make_llm, folders):
    """A server with the defaults, but that clients may name paths inside one folder."""
    llm = make_llm(folders / "store", allow_custom_save_path=[str(folders / "allowed")])
    with run_background(llm.front, ServerSettings()) as running:
        yield running


def ask(server, **options):
    body = {"prompt": "a path", "max_tokens": 1, "kv_transfer_params": options}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_a_path_inside_the_allowed_folder_is_taken(guarded, folders):
    target = folders / "allowed" / "deep" / "mine.safetensors"
    answer = ask(guarded, hidden_states_path=str(target))
    assert answer.json()["kv_transfer_params"]["hidden_states_path"] == str(target)
    assert httpx.get(f"{guarded.url}/v1/hidden_states/{answer.json()['id']}?wait=30").status_code == 200
    wait_until_at_rest(guarded)
    assert ask(guarded, hidden_states_path=str(target)).status_code == 409


@pytest.mark.parametrize(
    "path",
    [
        "{outside}/x.safetensors",
        "{allowed}/../outside/x.safetensors",
        "{allowed}/link/x.safetensors",
        "{allowed}/link/../../outside/x.safetensors",
        "{allowed}/file-link",
        "{allowed}",
        "{allowed}/" + "a" * 300 + ".safetensors",
        "{allowed}/" + "a/" * 3000 + "x.safetensors",
        "{allowed}/a\0b.safetensors",
        "relative.safetensors",
        "/etc/passwd",
        "/proc/self/mem",
        "",
    ],
)
def test_every_other_path_is_refused_and_nothing_is_written(guarded, folders, path):
    def found():
        return sorted(str(one) for one in folders.rglob("*") if one.parent.name != "store")

    before = found()
    answer = ask(guarded, hidden_states_path=path.format(**{name: folders / name for name in ("allowed", "outside")}))
    assert answer.status_code in (400, 409), answer.text
    assert answer.json()["error"]["param"] in ("kv_transfer_params.hidden_states_path", "hidden_states_path")
    assert found() == before
    assert (folders / "outside" / "file").read_text() == "precious"
    assert guarded.state.front.num_running == 0


def test_a_key_replaces_its_own_files_only(make_llm, folders):
    llm = make_llm(folders / "shared", allow_custom_save_path=[str(folders / "shared")])
    with run_background(llm.front, ServerSettings(api_keys=("one", "two"))) as running:

        def put(key, path):
            options = {"hidden_states_path": str(path), "overwrite": True, "tag": secrets.token_hex(4)}
            body = {"prompt": "a path", "max_tokens": 1, "kv_transfer_params": options}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)
            wait_until_at_rest(running)
            return answer

        mine, foreign = folders / "shared" / "mine.safetensors", folders / "shared" / "foreign.txt"
        assert put("one", mine).status_code == 200
        foreign.write_text("precious")
        kept = mine.read_bytes()
        for path in (mine, foreign):
            refused = put("two", path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "target_exists")
            assert "API key" in refused.json()["error"]["message"]
        assert (mine.read_bytes(), foreign.read_text()) == (kept, "precious")
        assert put("one", mine).status_code == 200
        assert mine.read_bytes() != kept


def test_files_and_weights_are_read_only_unless_the_server_says_otherwise(guarded):
    answer = ask(guarded)
    name = f"{guarded.url}/v1/hidden_states/{answer.json()['id']}"
    assert httpx.get(name, params={"wait": 30}).status_code == 200
    refused = httpx.delete(name)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
    refused = httpx.post(f"{guarded.url}/v1/weights", json={"path": "/tmp", "version": "1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
    with httpx.Client(base_url=guarded.url) as http:
        for path in ("/", "/page/status", f"/page/picture/{answer.json()['id']}"):
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                assert http.request(method, path).status_code == 405
    assert httpx.get(name).status_code == 200


def test_everything_in_the_store_has_the_umasks_mode(guarded, folders):
    before = os.umask(0o027)
    try:
        tag = f"mode-{secrets.token_hex(4)}"
        answer = ask(guarded, tag=tag)
        path = Path(answer.json()["kv_transfer_params"]["hidden_states_path"])
        assert httpx.get(f"{guarded.url}/v1/hidden_states/{answer.json()['id']}?wait=30").status_code == 200
        HandCapture(guarded.state.front, "mode-failed").fail("for its mode")
    finally:
        os.umask(before)
    store = folders / "store"
    for one in (path, path.with_name(path.name + ".lock"), store / "mode-failed.safetensors.error"):
        assert stat.S_IMODE(one.stat().st_mode) == 0o640, one
    tags = [one for one in (store / "tags").rglob("*") if one.is_file() and tag in one.name]
    assert [stat.S_IMODE(one.stat().st_mode) for one in tags] == [0o640]


def test_servers_listen_on_loopback_unless_told_otherwise():
    assert ServeOptions(model="m").host == "127.0.0.1"
    for command in (serve_command, serve_files):
        assert is_loopback(inspect.signature(command).parameters["host"].default)
