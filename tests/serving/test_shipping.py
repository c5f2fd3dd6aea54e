"""Object storage: complete or not at all, and the reason where it can't be."""

import secrets

import httpx
import pytest
import s3

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, MissingError, OptionError, WaitTimeoutError
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings
from layertap.writing.shipping import open_store

BODY = {
    "prompt": "to the bucket",
    "max_tokens": 3,
    "return_token_ids": True,
    "kv_transfer_params": {"include_output_tokens": True},
}


@pytest.fixture(scope="module")
def bucket():
    with s3.bucket() as url:
        yield url


def test_files_go_to_s3_and_come_back_checked(make_llm, tmp_path_factory, bucket, check_rows):
    folder = tmp_path_factory.mktemp("shipped")
    llm = make_llm(folder, handover=bucket)
    with run_background(llm.front, ServerSettings(served_model_names=("tiny",), allow_delete=True)) as server:
        with HiddenStatesClient(server.url) as client:
            answer = client.complete(**BODY, n=2)
            for choice in answer["choices"]:
                handle = choice["kv_transfer_params"]
                assert handle["hidden_states_url"] == f"{bucket}/{handle['hidden_states_id']}.safetensors"
                assert handle["hidden_states_path"] == handle["hidden_states_url"]
                check_rows(client.fetch(choice), (choice["prompt_token_ids"] + choice["token_ids"])[:-1])
        server.state.front.recorder.close()
        assert not [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        name = answer["id"]
        there = httpx.get(f"{server.url}/v1/hidden_states/{name}")
        assert (there.status_code, there.headers["location"]) == (303, f"{bucket}/{name}.safetensors")
        with HiddenStatesClient(server.url) as client:
            tokens = answer["choices"][0]["prompt_token_ids"] + answer["choices"][0]["token_ids"]
            check_rows(client.fetch(name), tokens[:-1])
            client.wait(name)
            client.delete(name)
            with pytest.raises(MissingError):
                client.fetch(name)
        assert 'layertap_shipped_files_total{outcome="stored"} 2.0' in httpx.get(f"{server.url}/metrics").text


def test_tags_and_paths_of_clients_lead_to_objects_of_their_own(make_llm, tmp_path_factory, bucket, tmp_path):
    llm = make_llm(tmp_path_factory.mktemp("tagged"), handover=bucket, allow_custom_save_path=True)
    tag = f"t-{secrets.token_hex(4)}"
    with run_background(llm.front) as server, HiddenStatesClient(server.url) as client:
        same = [
            client.complete(
                "x" * size,
                max_tokens=1,
                kv_transfer_params={"hidden_states_path": f"{tmp_path}/{size}/same.safetensors"},
            )
            for size in (3, 5)
        ]
        assert [len(client.fetch(answer["choices"][0])["token_ids"]) for answer in same] == [
            answer["usage"]["prompt_tokens"] for answer in same
        ]
        client.complete("tagged", max_tokens=1, n=2, kv_transfer_params={"tag": tag})
        handles = client.find(tag)
        assert len({handle["hidden_states_url"] for handle in handles}) == 2
        assert [client.fetch(handle)["token_ids"].numel() > 0 for handle in handles] == [True, True]


def test_other_stores_publish_by_rename_and_carry_reasons(make_llm, tmp_path_factory, tmp_path):
    llm = make_llm(tmp_path_factory.mktemp("local"), handover=f"file://{tmp_path}/out")
    with run_background(llm.front) as server, HiddenStatesClient(server.url) as client:
        good = client.complete(**BODY)["choices"][0]
        assert client.fetch(good)["token_ids"].numel() > 0
        name = good["kv_transfer_params"]["hidden_states_id"]
        broken = f"file://{tmp_path}/out/lost.safetensors"
        with pytest.raises(WaitTimeoutError):
            client.fetch({"hidden_states_url": broken, "hidden_states_id": name}, timeout=0.1)
        (tmp_path / "out" / "lost.safetensors.error").write_text('{"reason": "no luck"}')
        with pytest.raises(HiddenStatesError, match="no luck"):
            client.fetch({"hidden_states_url": broken, "hidden_states_id": name})
        server.state.front.recorder.close()
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".error", ".safetensors"]


def test_a_store_that_refuses_leaves_the_file_and_says_so(make_llm, tmp_path_factory, tmp_path):
    (tmp_path / "out").write_text("a file where the folder should be")
    folder = tmp_path_factory.mktemp("refused")
    llm = make_llm(folder, handover=f"file://{tmp_path}/out")
    with run_background(llm.front) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()
        server.state.front.recorder.close()
        assert httpx.get(f"{server.url}/v1/hidden_states/{answer['id']}").status_code == 200
        assert 'layertap_shipped_files_total{outcome="failed"} 1.0' in httpx.get(f"{server.url}/metrics").text


def test_an_unknown_protocol_is_refused_at_the_start():
    with pytest.raises(OptionError, match="nosuch"):
        open_store(f"nosuch://{secrets.token_hex(2)}")
