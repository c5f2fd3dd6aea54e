"""`/v1/hidden_states`: files over HTTP, in every state, for their owners only."""

import asyncio
import errno
import fcntl
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from captures import HandCapture

from layertap.capture.options import StoreOptions
from layertap.files import locks
from layertap.files.read import read_file
from layertap.serving import handoff
from layertap.serving.book import Entry
from layertap.serving.files_app import gated_files_app
from layertap.serving.handoff import FileDesk
from layertap.serving.identity import Caller


@pytest.fixture
def hand(llm):
    return HandCapture(llm.front, f"hand-{secrets.token_hex(8)}")


@pytest.fixture
def made(http):
    """The handle of a request that was answered."""
    body = {
        "model": "tiny",
        "prompt": "file over http",
        "max_tokens": 2,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    handle = http.post("/v1/completions", json=body).json()["kv_transfer_params"]
    read_file(handle["hidden_states_path"])
    return handle


def url(handle):
    return f"/v1/hidden_states/{handle['hidden_states_id']}"


def test_the_whole_file_comes_byte_for_byte(http, made):
    raw = Path(made["hidden_states_path"]).read_bytes()
    answer = http.get(url(made))
    assert answer.status_code == 200
    assert answer.content == raw
    assert int(answer.headers["content-length"]) == len(raw)
    head = http.head(url(made))
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", answer.headers["etag"])


@pytest.mark.parametrize(
    ("asked", "start", "end"), [("0-0", 0, 1), ("100-", 100, None), ("-7", -7, None), ("5-99999999", 5, None)]
)
def test_ranges_are_parts_of_the_file(http, made, asked, start, end):
    raw = Path(made["hidden_states_path"]).read_bytes()
    answer = http.get(url(made), headers={"range": f"bytes={asked}"})
    assert answer.status_code == 206
    assert answer.content == raw[start:end]
    first = start if start >= 0 else len(raw) + start
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(raw)}"


def test_ranges_that_arent_there_or_arent_understood(http, made):
    size = os.path.getsize(made["hidden_states_path"])
    outside = http.get(url(made), headers={"range": f"bytes={size}-"})
    assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{size}")
    for ignored in ("bytes=0-1,4-5", "rows=0-1", "bytes=-", "bytes=5-2", "nonsense"):
        assert http.get(url(made), headers={"range": ignored}).status_code == 200
    head = http.head(url(made), headers={"range": "bytes=0-1"})
    assert (head.status_code, head.headers["content-length"]) == (200, str(size))


def test_a_look_at_the_last_rows_is_no_delivery_and_a_transfer_that_goes_on_is(http, server, made):
    entry = server.state.book.get(made["hidden_states_id"])
    etag = http.get(url(made), headers={"range": "bytes=-8"}).headers["etag"]
    assert not entry.fetched
    assert http.get(url(made), headers={"range": "bytes=100-", "if-match": etag}).status_code == 206
    assert entry.fetched


def test_a_file_that_is_cut_off_while_it_is_read_closes_nothing_of_anybody_else(http, made, monkeypatch):
    real = os.pread

    def cut_off(fd, size, offset):
        if os.readlink(f"/proc/self/fd/{fd}") != made["hidden_states_path"] or offset != 100:
            return real(fd, size, offset)
        return b""

    monkeypatch.setattr(os, "pread", cut_off)
    answer = http.get(url(made), headers={"range": "bytes=100-"})
    assert (answer.status_code, "cut off" in answer.text) == (500, True)


def test_the_etag_is_the_files_digest_and_conditions_are_kept(http, made):
    etag = http.get(url(made)).headers["etag"]
    assert etag.strip('"') in Path(made["hidden_states_path"]).read_bytes()[: 1 << 16].decode("latin-1")
    assert http.get(url(made), headers={"if-none-match": etag}).status_code == 304
    assert http.get(url(made), headers={"if-match": '"other"'}).status_code == 412
    assert http.get(url(made), headers={"if-match": f'"a", {etag}', "range": "bytes=0-3"}).status_code == 206
    assert http.get(url(made), headers={"if-range": '"other"', "range": "bytes=0-3"}).status_code == 200


def test_a_file_on_its_way_is_202_and_waited_for(http, hand):
    name = f"/v1/hidden_states/{hand.name}"
    answer = http.get(name)
    assert (answer.status_code, answer.json()["state"]) == (202, "writing")
    assert http.get(name, params={"wait": 0.05}).status_code == 202
    for wish in ("respond-async", "wait=x", "respond-async, wait=0"):
        assert http.get(name, headers={"prefer": wish}).status_code == 202
    publisher = threading.Timer(0.1, hand.publish)
    assert http.delete(name).status_code == 409
    publisher.start()
    answer = http.get(name, headers={"prefer": "respond-async, wait=30"})
    publisher.join()
    assert (answer.status_code, answer.content) == (200, hand.path.read_bytes())
    assert http.get(name, params={"wait": 30}).content == answer.content
    assert http.get(name, params={"wait": 1e9}).status_code == 400


def test_a_failed_capture_is_410_with_its_reason(http, hand):
    hand.fail("the moon was in the way")
    answer = http.get(f"/v1/hidden_states/{hand.name}")
    assert answer.status_code == 410
    assert "the moon was in the way" in answer.json()["error"]["message"]


def test_a_dead_writer_is_410(http, storage):
    name = f"dead-{secrets.token_hex(8)}"
    code = (
        "import os, sys; from pathlib import Path; from layertap.files.locks import WriterLock; "
        "WriterLock(Path(sys.argv[1]), 'r'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(storage / f"{name}.safetensors")], check=False)
    answer = http.get(f"/v1/hidden_states/{name}")
    assert (answer.status_code, "died" in answer.text or "ended" in answer.text) == (410, True)


def test_a_damaged_file_is_410_not_bytes(http, hand):
    path = hand.publish()
    raw = bytearray(path.read_bytes())
    raw[40] ^= 1
    path.write_bytes(raw)
    assert http.get(f"/v1/hidden_states/{hand.name}").status_code == 410


def test_deleting_frees_the_file_once(http, made, storage):
    assert http.delete(url(made)).status_code == 204
    assert not any(made["hidden_states_id"] in name for name in os.listdir(storage))
    assert http.delete(url(made)).status_code == 404
    assert http.get(url(made)).status_code == 404


def test_a_file_that_is_read_stays(http, made):
    with open(made["hidden_states_path"], "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert http.delete(url(made)).status_code == 409
    assert http.delete(url(made)).status_code == 204


def test_a_reader_that_is_done_in_a_moment_is_waited_for(http, made, monkeypatch):
    reader = open(made["hidden_states_path"], "rb")  # noqa: SIM115 (closed below)
    real, looks = fcntl.flock, []
    real(reader, fcntl.LOCK_SH)

    def flock(fd, operation):
        try:
            return real(fd, operation)
        except BlockingIOError:
            looks.append(operation)
            if len(looks) == 3:
                reader.close()
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    assert http.delete(url(made)).status_code == 204
    assert len(looks) == 3
    assert http.get(url(made)).status_code == 404


def test_what_cannot_be_removed_is_not_answered_as_gone(http, made, monkeypatch):
    real = os.unlink

    def refuse(path, **options):
        if str(path) == made["hidden_states_path"]:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        real(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    answer = http.delete(url(made))
    assert (answer.status_code, "not permitted" in answer.text) == (500, True)
    assert answer.headers["connection"] == "close"
    assert http.get(url(made)).status_code == 200


def test_a_tag_finds_its_files_and_their_states(http):
    tag = f"tag-{secrets.token_hex(4)}"
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 1, "kv_transfer_params": {"tag": tag}}
    answer = http.post("/v1/completions", json=body).json()
    record = http.get(f"/v1/hidden_states/tags/{tag}").json()
    assert record["request_id"] == answer["id"]
    wanted = [choice["kv_transfer_params"]["hidden_states_id"] for choice in answer["choices"]]
    assert [handle["hidden_states_id"] for handle in record["handles"]] == wanted
    assert {handle["state"] for handle in record["handles"]} <= {"ready", "writing"}
    assert http.get("/v1/hidden_states/tags/never-used").status_code == 404
    assert http.get("/v1/hidden_states/tags/..%2Fx").status_code == 404


TRICKS = [
    "..",
    ".",
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "%2e%2e%2f",
    "..%5c..%5cx",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    ".secret",
    "a%00b",
    "%00",
    "a" * 5000,
    "%ff%fe",
    "link",
    "tags",
    "tags/..",
    "tags/%2e%2e%2flink",
    "sub%2ffile",
    "a%20b",
    "%F0%9F%92%A9",
    "cmpl-x;rm",
    "cmpl-x?y",
]


@pytest.mark.parametrize("trick", TRICKS, ids=range(len(TRICKS)))
def test_path_tricks_find_nothing(server, storage, tmp_path, trick):
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"secret" * 100)
    (storage / "link.safetensors").unlink(missing_ok=True)
    (storage / "link.safetensors").symlink_to(outside)
    (storage / ".secret.safetensors").write_bytes(b"secret")
    for method in ("GET", "HEAD", "DELETE"):
        command = ["curl", "-s", "-i", "--path-as-is", "-X", method, f"{server.url}/v1/hidden_states/{trick}"]
        if method == "HEAD":
            command[3:5] = ["-I"]
        raw = subprocess.run(command, capture_output=True, timeout=60, check=False).stdout
        status = raw.split(b" ", 2)[1]
        assert status in (b"404", b"410", b"405", b"400", b"307"), (method, raw[:300])
        assert b"secret" not in raw.partition(b"\r\n\r\n")[2]
    assert outside.exists()


def test_a_key_sees_its_own_files_and_tags_only(keyed):
    alpha, beta = (
        httpx.Client(base_url=keyed.url, headers={"authorization": f"Bearer {key}"})
        for key in ("alpha-key", "beta-key")
    )
    with alpha, beta:
        body = {"model": "tiny", "prompt": "mine", "max_tokens": 1, "kv_transfer_params": {"tag": "same-name"}}
        handles = [one.post("/v1/completions", json=body).json()["kv_transfer_params"] for one in (alpha, beta)]
        assert handles[0]["hidden_states_id"] != handles[1]["hidden_states_id"]
        for mine, theirs, one in ((handles[0], handles[1], alpha), (handles[1], handles[0], beta)):
            assert one.get(url(mine), params={"wait": 30}).status_code == 200
            assert (
                one.get("/v1/hidden_states/tags/same-name").json()["handles"][0]["hidden_states_id"]
                == mine["hidden_states_id"]
            )
            for method in ("GET", "HEAD", "DELETE"):
                assert one.request(method, url(theirs)).status_code == 404
        assert os.path.exists(handles[0]["hidden_states_path"])
        # an id that only looks owned
        forged = handles[0]["hidden_states_id"].replace("cmpl-", "cmpl-" + handles[1]["hidden_states_id"][5:] + "-")
        assert beta.get(f"/v1/hidden_states/{forged}").status_code == 404


def test_a_folder_alone_is_served_the_same_way(llm, storage, hand):
    path = hand.publish()
    transport = httpx.ASGITransport(gated_files_app(storage, api_keys=["only"]))

    async def ask():
        async with httpx.AsyncClient(transport=transport, base_url="http://files") as one:
            refused = await one.get(f"/v1/hidden_states/{hand.name}")
            one.headers["authorization"] = "Bearer only"
            return (
                refused,
                await one.get(f"/v1/hidden_states/{hand.name}"),
                await one.delete(f"/v1/hidden_states/{hand.name}"),
            )

    refused, found, deleted = asyncio.run(ask())
    assert refused.status_code == 401
    assert found.content == path.read_bytes()
    assert (deleted.status_code, path.exists()) == (403, True)


def test_a_replaced_file_isnt_handed_out_under_the_old_id(make_llm, tmp_path):
    llm = make_llm(tmp_path / "own", allow_custom_save_path=[str(tmp_path)])
    hand = HandCapture(llm.front, "first")
    path = hand.publish()

    class Known:
        def get(self, name):
            return Entry(name=name, file=str(path), layers=(1, 2), admitted=0.0)

        def note_fetched(self, name): ...

    desk = FileDesk(StoreOptions(shared_storage_path=str(tmp_path)), Known())
    assert desk.look("first", Caller()).state == "ready"
    assert desk.look("second", Caller()).state == "failed"


def test_without_flock_the_lock_files_content_counts(hand, http, llm, monkeypatch):
    """A file system without flock (some NFS mounts): the lock file's content says who writes."""

    def no_flock(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(locks.fcntl, "flock", no_flock)
    assert http.get(f"/v1/hidden_states/{hand.name}").status_code == 202
    path = hand.publish()
    assert http.get(f"/v1/hidden_states/{hand.name}").content == path.read_bytes()
    other = HandCapture(llm.front, f"hand-{secrets.token_hex(8)}")
    other.fail("no luck")
    assert http.get(f"/v1/hidden_states/{other.name}").status_code == 410


def test_a_file_published_between_two_looks_is_found(llm, storage, monkeypatch):
    """The reader looked for the file before it was there, and for its writer after it was gone."""
    hand = HandCapture(llm.front, f"raced-{secrets.token_hex(8)}")
    desk = FileDesk(llm.front.options)

    def read_late(path, read=handoff.read_header):
        try:
            return read(path)
        finally:
            if not hand.path.exists():
                hand.publish()

    monkeypatch.setattr(handoff, "read_header", read_late)
    assert desk.look(hand.name, Caller()).state == "ready"
