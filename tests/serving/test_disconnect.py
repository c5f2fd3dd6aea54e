"""A client that goes away frees everything, at whatever point it goes."""

import socket

import httpx
import pytest
from waiting import wait_until

BODY = {
    "model": "tiny",
    "prompt": "a client that leaves",
    "max_tokens": 200,
    "ignore_eos": True,
    "kv_transfer_params": {"include_output_tokens": True},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("after_chunks", [0, 1, 5])
def test_leaving_a_stream_aborts_it_and_its_reader_is_told(http, server, path, after_chunks):
    body = {**BODY, "stream": True}
    if "chat" in path:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]
    with http.stream("POST", path, json=body) as answer:
        name = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        for _ in range(2 * after_chunks):
            next(lines)
    wait_until(lambda: server.state.front.num_running == 0, "it didn't happen", seconds=30)
    answer = http.get(f"/v1/hidden_states/{name}", params={"wait": 30})
    assert answer.status_code == 410
    assert "aborted" in answer.json()["error"]["message"]


def test_leaving_before_the_answer_aborts_it(http, server):
    tag = "left-early"
    body = {**BODY, "kv_transfer_params": {"include_output_tokens": True, "tag": tag}}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.15)
    wait_until(
        lambda: server.state.front.num_running == 0 and server.state.num_running == 0, "it didn't happen", seconds=30
    )
    record = http.get(f"/v1/hidden_states/tags/{tag}")
    assert record.status_code in (200, 404)
    if record.status_code == 200:
        (handle,) = record.json()["handles"]
        assert handle["state"] in ("failed", "writing")


def test_a_half_sent_request_starts_nothing(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    admitted = server.state.front.recorder.counts.admitted
    for raw in (
        b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"prompt":',
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        b"\x00\x01garbage\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as one:
            one.sendall(raw)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.state.front.recorder.counts.admitted == admitted
