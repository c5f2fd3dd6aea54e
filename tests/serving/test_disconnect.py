"""A client that goes away frees everything, at whatever point it goes."""

import json
import secrets
import socket

import httpx
import pytest
from waiting import wait_until, wait_until_at_rest

NUM_CHOICES = 64
"""Many more than run at once: however late the server notices that nobody listens, the last ones haven't begun."""
BODY = {
    "model": "tiny",
    "prompt": "a client that leaves",
    "max_tokens": 200,
    "n": NUM_CHOICES,
    "ignore_eos": True,
    "kv_transfer_params": {"include_output_tokens": True},
}


def check_what_readers_are_told(http, names):
    """Some may have come to their end."""
    answers = [http.get(f"/v1/hidden_states/{name}", params={"wait": 30}) for name in names]
    told = [answer.json()["error"]["message"] for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in answers} <= {200, 410}
    assert answers[-1].status_code == 410
    assert all("aborted" in reason for reason in told)


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
    wait_until_at_rest(server)
    check_what_readers_are_told(http, [name, *(f"{name}-0-{choice}" for choice in range(1, NUM_CHOICES))])


def test_leaving_before_the_answer_aborts_it(http, server):
    tag = f"left-{secrets.token_hex(4)}"
    raw = json.dumps({**BODY, "kv_transfer_params": {"include_output_tokens": True, "tag": tag}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as one:
        one.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_until(lambda: server.state.front.num_running == NUM_CHOICES, "it was not admitted")
    wait_until_at_rest(server)
    wait_until(lambda: server.state.num_running == 0, "it still counts as running")
    handles = http.get(f"/v1/hidden_states/tags/{tag}").json()["handles"]
    assert len(handles) == NUM_CHOICES
    check_what_readers_are_told(http, [handle["hidden_states_id"] for handle in handles])


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
