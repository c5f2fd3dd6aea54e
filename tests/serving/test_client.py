"""`layertap.client`: request, wait, fetch, verify, delete; and what happens when the network doesn't play along."""

import asyncio
import errno
import os
import secrets
import socket
import threading

import httpx
import pytest
from captures import HandCapture

from layertap.client import AsyncHiddenStatesClient, HiddenStatesClient, ServerError, landing
from layertap.errors import CorruptError, HiddenStatesError, LayertapError, MissingError, TornError, WaitTimeoutError
from layertap.serving.server import run_background


@pytest.fixture(params=[True, False], ids=["by-path", "by-http"])
def states_client(server, request):
    with HiddenStatesClient(server.url, local=request.param) as client:
        yield client


@pytest.fixture
def remote(server):
    with HiddenStatesClient(server.url, local=False) as client:
        yield client


def test_request_wait_fetch_delete(states_client, check_rows):
    answer = states_client.complete(
        "a rollout", max_tokens=5, return_token_ids=True, kv_transfer_params={"include_output_tokens": True}
    )
    (choice,) = answer["choices"]
    states_client.wait(choice)
    check_rows(states_client.fetch(choice), (choice["prompt_token_ids"] + choice["token_ids"])[:-1])
    assert states_client.fetch_raw(choice["kv_transfer_params"]).info.facts["request_id"] == answer["id"]
    states_client.delete(answer["id"])
    states_client.delete(answer["id"])
    with pytest.raises(MissingError):
        states_client.fetch(answer["id"])


def test_chats_tags_and_models(states_client):
    tag = f"c-{secrets.token_hex(4)}"
    answer = states_client.chat([{"role": "user", "content": "hi"}], max_tokens=1, n=2, kv_transfer_params={"tag": tag})
    handles = states_client.find(tag)
    assert [handle["hidden_states_id"] for handle in handles] == [answer["id"], answer["id"] + "-0-1"]
    assert states_client.fetch(handles[1])["token_ids"].numel() > 0
    assert states_client.models()[0]["id"] == "tiny"


def test_the_async_client_does_the_same(server, check_rows):
    async def work():
        async with AsyncHiddenStatesClient(server.url, local=False) as client:
            answers = await asyncio.gather(
                *(client.complete(f"prompt {i}", max_tokens=2, return_token_ids=True) for i in range(20))
            )
            states = await asyncio.gather(*(client.fetch(answer["choices"][0]) for answer in answers))
            for answer in answers:
                await client.wait(answer["id"])
                await client.delete(answer["id"])
            with pytest.raises(MissingError):
                await client.fetch(answers[0]["id"])
            with pytest.raises(ServerError, match="temprature"):
                await client.complete("x", temprature=1)
            return list(zip(answers, states, strict=True))

    for answer, states in asyncio.run(work()):
        check_rows(states, answer["choices"][0]["prompt_token_ids"])


def test_refusals_are_errors_with_their_field(remote):
    with pytest.raises(ServerError, match="layers") as caught:
        remote.complete("x", kv_transfer_params={"layer": [1]})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "kv_transfer_params", "invalid_value")
    for tag in ("no-such-tag", "no/such?tag#"):
        with pytest.raises(ServerError, match="no request with this tag|Not Found") as caught:
            remote.find(tag)
        assert caught.value.status == 404


def test_waiting_ends_with_the_file_its_reason_or_the_timeout(llm, remote):
    slow = HandCapture(llm.front, f"slow-{secrets.token_hex(4)}")
    with pytest.raises(WaitTimeoutError):
        remote.fetch(slow.name, timeout=0.2)
    publisher = threading.Timer(0.2, slow.publish)
    publisher.start()
    assert remote.fetch_raw(slow.name, timeout=60).token_ids.tolist() == slow.ids
    failing = HandCapture(llm.front, f"failing-{secrets.token_hex(4)}")
    failer = threading.Timer(0.2, failing.fail, ["out of luck"])
    failer.start()
    with pytest.raises(HiddenStatesError, match="out of luck"):
        remote.wait(failing.name, timeout=60)
    publisher.join()
    failer.join()


def test_a_file_is_waited_for_longer_than_one_request_may_take(llm, server):
    slow = HandCapture(llm.front, f"slow-{secrets.token_hex(4)}")
    publisher = threading.Timer(3.0, slow.publish)
    publisher.start()
    with HiddenStatesClient(server.url, local=False, timeout=2.0, retries=0) as client:
        client.wait(slow.name, timeout=60)
        assert client.fetch_raw(slow.name, timeout=60).token_ids.tolist() == slow.ids
    publisher.join()


def test_a_file_of_another_request_under_the_same_path_is_never_taken(make_llm, tmp_path):
    own = make_llm(tmp_path / "store", allow_custom_save_path=True, ttl_seconds=3600.0)
    with run_background(own.front) as server, HiddenStatesClient(server.url) as client:
        shared = {"hidden_states_path": str(tmp_path / "same.safetensors"), "overwrite": True}
        first, second = (client.complete("x" * n, max_tokens=1, kv_transfer_params=shared) for n in (3, 5))
        assert client.fetch(second["choices"][0])["token_ids"].numel() == second["usage"]["prompt_tokens"]
        with pytest.raises(HiddenStatesError, match=f"replaced by request {second['id']}"):
            client.fetch(first["choices"][0])
        # and where this machine has a file of that name by itself
        away = {"hidden_states_path": str(tmp_path / "same.safetensors"), "hidden_states_id": "elsewhere"}
        with pytest.raises(MissingError):
            client.fetch(away)


def test_what_this_user_may_not_read_comes_by_http(llm, server, monkeypatch):
    hand = HandCapture(llm.front, f"private-{secrets.token_hex(4)}")
    path = hand.publish()
    real, asked = os.open, []

    def refuse(name, *args, **kwargs):
        if str(name) == f"{path}.lock" and threading.current_thread() is threading.main_thread():
            asked.append(name)
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with HiddenStatesClient(server.url) as client:
        handle = {"hidden_states_path": str(path), "hidden_states_id": hand.name}
        assert client.fetch_raw(handle).token_ids.tolist() == hand.ids
    assert asked


class Flaky(threading.Thread):
    """A proxy that cuts each of the first connections after some bytes of the server's answer, for real."""

    def __init__(self, url, cuts):
        super().__init__(daemon=True)
        host, _, port = url.removeprefix("http://").partition(":")
        self.target = (host, int(port))
        self.cuts = list(cuts)
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.start()

    def run(self):
        while True:
            try:
                mine, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            cut = self.cuts.pop(0) if self.cuts else None
            threading.Thread(target=self.pump, args=(mine, cut), daemon=True).start()

    def pump(self, mine, cut):
        with mine, socket.create_connection(self.target) as theirs:
            threading.Thread(target=self.copy, args=(mine, theirs, None), daemon=True).start()
            self.copy(theirs, mine, cut)
            for one in (mine, theirs):
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    @staticmethod
    def copy(source, target, cut):
        try:
            while data := source.recv(1 << 16 if cut is None else min(1 << 16, cut)):
                target.sendall(data)
                if cut is not None:
                    cut -= len(data)
                    if cut <= 0:
                        return
        except OSError:
            return

    def close(self):
        self.listener.close()


def test_a_broken_transfer_goes_on_where_it_broke(llm, server):
    hand = HandCapture(llm.front, f"large-{secrets.token_hex(4)}", num_tokens=200)
    hand.publish()
    size = hand.path.stat().st_size
    proxy = Flaky(server.url, [size // 3, 500, size // 3])
    http = httpx.Client(base_url=proxy.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=30)
    with HiddenStatesClient(http=http, local=False) as client:
        assert client.fetch_raw(hand.name).token_ids.tolist() == hand.ids
    assert proxy.connections == 4
    proxy.cuts = [100] * 20
    http = httpx.Client(base_url=proxy.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=30)
    with (
        HiddenStatesClient(http=http, local=False, retries=2) as client,
        pytest.raises(TornError, match="broke off 3 times"),
    ):
        client.fetch(hand.name)
    proxy.close()


def test_an_answer_that_may_exist_is_never_asked_for_twice(server):
    proxy = Flaky(server.url, [10, None])
    with HiddenStatesClient(proxy.url, local=False) as client, pytest.raises(LayertapError, match="tag"):
        client.complete("once", max_tokens=1)
    assert proxy.connections == 1
    proxy.close()


def answering(*answers):
    """A client whose server gives these answers, one by one."""
    left = list(answers)

    def handle(request):
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return HiddenStatesClient(http=httpx.Client(transport=httpx.MockTransport(handle), base_url="http://x")), left


def test_what_was_refused_unread_or_never_arrived_is_sent_again():
    busy = httpx.Response(429, json={"error": {"message": "busy"}}, headers={"retry-after": "0"})
    client, left = answering(
        httpx.ConnectError("no"), busy, httpx.Response(503, text="starting"), httpx.Response(200, json={"id": "a"})
    )
    assert client.complete("x") == {"id": "a"}
    assert not left
    client, left = answering(httpx.Response(507, json={"error": {"message": "full", "code": "store_full"}}))
    with pytest.raises(ServerError, match="full"):
        client.complete("x")


def test_what_another_reads_is_deleted_when_it_is_done():
    in_use = httpx.Response(409, json={"error": {"message": "read", "code": "busy"}})
    client, left = answering(in_use, in_use, httpx.Response(204))
    client.delete("a")
    assert not left
    client, left = answering(*[in_use] * 5)
    with pytest.raises(ServerError, match="409: read"):
        client.delete("a")
    assert not left


def test_damage_on_the_way_is_found(llm, server):
    hand = HandCapture(llm.front, f"damaged-{secrets.token_hex(4)}")
    raw = bytearray(hand.publish().read_bytes())
    raw[-20] ^= 1

    def handle(request):
        return httpx.Response(200, content=bytes(raw), headers={"etag": '"x"'})

    http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://x")
    with HiddenStatesClient(http=http) as client, pytest.raises(CorruptError):
        client.fetch(hand.name)


def test_streams_are_for_another_client(remote):
    with pytest.raises(ValueError, match="openai"):
        remote.complete("x", stream=True)
    with pytest.raises(ValueError, match="handle"):
        remote.fetch({})


def test_what_the_openai_client_got_is_a_handle_too(client, remote):
    extra = {"return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}, "ignore_eos": True}
    answer = client.completions.create(model="tiny", prompt="whole", max_tokens=3, extra_body=extra)
    (choice,) = answer.choices
    tokens = choice.prompt_token_ids + choice.token_ids
    for handle in (answer, choice, choice.kv_transfer_params):
        assert remote.fetch(handle)["token_ids"].tolist() == tokens[:-1]
    chunks = list(client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True, extra_body=extra))
    assert remote.fetch(chunks[-1].choices[0])["token_ids"].numel() > 0
    with pytest.raises(ValueError, match="handle"):
        remote.fetch(chunks[0].choices[0])


def test_what_is_large_lands_on_a_disk_and_is_the_same(llm, remote, monkeypatch):
    hand = HandCapture(llm.front, f"landed-{secrets.token_hex(4)}", num_tokens=3000)
    hand.publish()
    in_memory = remote.fetch_raw(hand.name)
    monkeypatch.setattr(landing, "_MAX_MEMORY_BYTES", 1 << 20)
    on_disk = remote.fetch_raw(hand.name)
    assert (in_memory.rows == on_disk.rows).all()
    assert on_disk.token_ids.tolist() == hand.ids


def test_hundreds_at_once_have_a_connection_each_and_use_it_again(llm, server):
    hand = HandCapture(llm.front, f"shared-{secrets.token_hex(4)}")
    hand.publish()
    proxy = Flaky(server.url, [])

    async def work():
        async with AsyncHiddenStatesClient(proxy.url, local=False) as client:
            for _ in range(3):
                loaded = await asyncio.gather(*(client.fetch_raw(hand.name) for _ in range(100)))
                assert all(one.token_ids.tolist() == hand.ids for one in loaded)
            first = asyncio.create_task(client.fetch_raw("never", timeout=60))
            await asyncio.sleep(0)
            first.cancel()
            assert (await client.fetch_raw(hand.name)).token_ids.tolist() == hand.ids

    asyncio.run(work())
    assert 1 <= proxy.connections <= 102
    proxy.close()
