"""Readers slower than the engine: they hold nothing up, the server holds nothing for them, and they still get all of it."""

import gc
import json
import os
import secrets
import socket
from pathlib import Path

import httpx
from captures import HandCapture
from waiting import wait_until

from layertap.client import HiddenStatesClient
from layertap.serving.server import run_background

BODY = {"prompt": "rows and rows", "ignore_eos": True, "kv_transfer_params": {"include_output_tokens": True}}


def asked(url, request, body=b""):
    """A connection whose answer nobody has read yet, with little room for it."""
    host, _, port = url.removeprefix("http://").partition(":")
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    one.connect((host, int(port)))
    one.sendall(f"{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n".encode())
    one.sendall(f"content-length: {len(body)}\r\n\r\n".encode() + body)
    return one


def rest(one):
    """What the server sends, to the end."""
    parts = []
    while part := one.recv(1 << 16):
        parts.append(part)
    one.close()
    return b"".join(parts)


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_files_that_nobody_takes_from_the_wire_are_not_held_in_memory(llm, server):
    large = HandCapture(llm.front, f"large-{secrets.token_hex(4)}", num_tokens=40_000)
    raw = large.publish().read_bytes()
    assert len(raw) > 20 << 20
    before = resident_bytes()
    stalled = [asked(server.url, f"GET /v1/hidden_states/{large.name}") for _ in range(24)]
    for one in stalled:
        assert one.recv(12) == b"HTTP/1.1 200"
    with HiddenStatesClient(server.url, local=False) as client:
        for _ in range(5):
            assert client.fetch(client.complete(**BODY, max_tokens=3)["choices"][0])["token_ids"].numel() > 3
    assert resident_bytes() - before < 24 * len(raw) / 4
    assert rest(stalled.pop()).endswith(raw)
    for one in stalled:
        one.close()


def test_streams_that_nobody_reads_end_are_published_and_lose_nothing(server, http):
    body = {**BODY, "max_tokens": 150, "stream": True, "logprobs": 20, "return_token_ids": True}
    counts = server.state.front.recorder.counts
    admitted = counts.admitted + 16
    streams = [asked(server.url, "POST /v1/completions", json.dumps({**body, "seed": n}).encode()) for n in range(16)]
    wait_until(
        lambda: (
            counts.admitted == admitted and server.state.front.num_running == 0 and server.state.book.num_writing == 0
        ),
        "a stream that nobody reads holds its generation up",
    )
    assert server.state.front.recorder.budget.in_flight_bytes == 0
    for one in streams:
        lines = [line for line in rest(one).decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
        tokens = choices[0]["prompt_token_ids"] + [token for choice in choices for token in choice["token_ids"]]
        assert len(tokens) - len(choices[0]["prompt_token_ids"]) == 150
        with HiddenStatesClient(server.url) as client:
            assert client.fetch(choices[-1])["token_ids"].tolist() == tokens[:-1]


def test_rows_in_memory_stay_within_their_limit_whatever_runs(make_llm, tmp_path_factory, check_rows):
    limit = 24_000  # 31 rows
    llm = make_llm(tmp_path_factory.mktemp("tight"), max_bytes_in_flight=limit, num_writer_threads=1)
    body = {**BODY, "max_tokens": 20, "return_token_ids": True}
    with run_background(llm.front) as server, HiddenStatesClient(server.url) as client:
        answer = client.complete(**{**body, "prompt": [list(range(9, 9 + size)) for size in range(5, 30)]}, n=2)
        for choice in answer["choices"]:
            check_rows(client.fetch(choice), (choice["prompt_token_ids"] + choice["token_ids"])[:-1])
        gauges = httpx.get(f"{server.url}/metrics").text
    budget = llm.front.recorder.budget
    assert 0 < budget.peak_bytes <= limit
    assert f"layertap_bytes_in_flight_limit {float(limit)}" in gauges
    assert "layertap_bytes_in_flight 0.0" in gauges
