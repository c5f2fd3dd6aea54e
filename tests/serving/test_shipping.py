"""Object storage: complete or not at all, and the reason where it can't be."""

import secrets

import boto3
import fsspec
import httpx
import pytest
from moto.server import ThreadedMotoServer

from layertap.client import HiddenStatesClient
from layertap.errors import HiddenStatesError, OptionError, WaitTimeoutError
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings
from layertap.serving.shipping import open_store

BODY = {
    "prompt": "to the bucket",
    "max_tokens": 3,
    "return_token_ids": True,
    "kv_transfer_params": {"include_output_tokens": True},
}


@pytest.fixture(scope="module")
def bucket():
    """A bucket of an S3 server in this process, and fsspec told where it is."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {"endpoint_url": url}
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="states")
    yield "s3://states/run-1"
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)
    patch.undo()
    server.stop()


def test_files_go_to_s3_and_come_back_checked(make_llm, tmp_path_factory, bucket, check_rows):
    folder = tmp_path_factory.mktemp("shipped")
    llm = make_llm(folder, handover=bucket)
    with run_background(llm.front, ServerSettings(served_model_names=("tiny",))) as server:
        with HiddenStatesClient(server.url) as client:
            answer = client.complete(**BODY, n=2)
            for choice in answer["choices"]:
                handle = choice["kv_transfer_params"]
                assert handle["hidden_states_url"] == f"{bucket}/{handle['hidden_states_id']}.safetensors"
                assert handle["hidden_states_path"] == handle["hidden_states_url"]
                check_rows(client.fetch(choice), (choice["prompt_token_ids"] + choice["token_ids"])[:-1])
        server.state.close()
        assert not [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        answer = httpx.get(f"{server.url}/v1/hidden_states/{answer['id']}")
        assert (answer.status_code, answer.headers["location"]) == (
            303,
            handle["hidden_states_url"].replace("-0-1", ""),
        )
        assert 'layertap_shipped_files_total{outcome="stored"} 2.0' in httpx.get(f"{server.url}/metrics").text


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
        server.state.close()
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".error", ".safetensors"]


def test_a_store_that_refuses_leaves_the_file_and_says_so(make_llm, tmp_path_factory, tmp_path):
    (tmp_path / "out").write_text("a file where the folder should be")
    folder = tmp_path_factory.mktemp("refused")
    llm = make_llm(folder, handover=f"file://{tmp_path}/out")
    with run_background(llm.front) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()
        server.state.front.recorder.pool.close()
        server.state.close()
        assert httpx.get(f"{server.url}/v1/hidden_states/{answer['id']}").status_code == 200
        assert 'layertap_shipped_files_total{outcome="failed"} 1.0' in httpx.get(f"{server.url}/metrics").text


def test_an_unknown_protocol_is_refused_at_the_start():
    with pytest.raises(OptionError, match="nosuch"):
        open_store(f"nosuch://{secrets.token_hex(2)}")
