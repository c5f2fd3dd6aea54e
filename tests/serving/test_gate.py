"""What every request passes first: keys and sizes."""

import base64

import httpx
import pytest
from captures import KEYS

from layertap.errors import OptionError
from layertap.serving.identity import ApiKeys, Caller, clean_client_id, new_id
from layertap.serving.server import run_background
from layertap.serving.settings import KEY_ENV, VLLM_KEY_ENV, ServerSettings, api_keys

ROUTES = [
    ("GET", "/"),
    ("GET", "/page/status"),
    ("GET", "/page/picture/x"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/hidden_states/x"),
    ("DELETE", "/v1/hidden_states/x"),
    ("GET", "/v1/hidden_states/tags/x"),
    ("POST", "/v1/weights"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/no/such/route"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_health_wants_a_key(keyed, method, path):
    with httpx.Client(base_url=keyed.url) as http:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": KEYS[0]}):
            answer = http.request(method, path, headers=header)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "basic" in answer.headers["www-authenticate"].lower()
        assert http.get("/health").status_code == 200


def test_each_key_opens_as_bearer_and_as_a_browsers_password(keyed):
    for key in KEYS:
        basic = base64.b64encode(f"me:{key}".encode()).decode()
        for header in (f"Bearer {key}", f"bearer {key}", f"Basic {basic}"):
            assert httpx.get(f"{keyed.url}/v1/models", headers={"authorization": header}).status_code == 200
    for broken in ("Basic !!!", "Basic eA==", "Digest x", "Bearer \xff"):
        assert (
            httpx.get(f"{keyed.url}/v1/models", headers={"authorization": broken.encode("latin-1")}).status_code == 401
        )


def test_bodies_over_the_limit_are_refused_with_and_without_a_length(llm):
    with run_background(llm.front, ServerSettings(max_body_bytes=1000, served_model_names=("tiny",))) as server:
        body = b'{"model": "tiny", "prompt": "' + b"x" * 2000 + b'"}'
        kind = {"content-type": "application/json"}
        with_length = httpx.post(f"{server.url}/v1/completions", content=body, headers=kind)
        chunked = httpx.post(f"{server.url}/v1/completions", content=iter([body[:900], body[900:]]), headers=kind)
        for answer in (with_length, chunked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_more_than_may_run_get_a_429(llm):
    with run_background(llm.front, ServerSettings(max_running=2, served_model_names=("tiny",))) as server:
        server.state.num_running += 2
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        server.state.let_out(2)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
        assert answer.status_code == 200


def test_ids_carry_their_owner_only_where_there_are_several_keys():
    one = ApiKeys(["k"]).caller({"authorization": "Bearer k"})
    assert one == Caller("")
    keys = ApiKeys(["k", "l"])
    k, other = (keys.caller({"authorization": f"Bearer {key}"}) for key in "kl")
    assert k.owner != other.owner
    assert ApiKeys(["l", "k"]).caller({"authorization": "Bearer k"}) == k
    for client_id in (None, "job-1", f"x-{other.owner}0123456789abcdef", "a" * 200):
        name = new_id("cmpl", k, client_id)
        assert k.may_see(name)
        assert k.may_see(f"{name}-3-12")
        assert not other.may_see(name)
        assert not other.may_see(f"{name}-{other.owner}")
    assert new_id("cmpl", k) != new_id("cmpl", k)


def test_client_ids_are_plain_afterwards():
    assert clean_client_id("a b/../c\n\x00\u00e9") == "a_b_.._c___".replace(".", "_")


@pytest.mark.parametrize(
    "change", [{"max_running": 0}, {"max_body_bytes": True}, {"max_logprobs": "3"}, {"reap_seconds": 0}]
)
def test_bad_settings_name_themselves(change):
    with pytest.raises(OptionError, match=next(iter(change))):
        ServerSettings(**change)


def test_keys_of_the_environment_count_where_none_is_given(monkeypatch):
    for name in (KEY_ENV, VLLM_KEY_ENV):
        monkeypatch.delenv(name, raising=False)
    assert api_keys(None) == ()
    monkeypatch.setenv(VLLM_KEY_ENV, "of vLLM's documentation")
    assert api_keys([]) == ("of vLLM's documentation",)
    monkeypatch.setenv(KEY_ENV, "ours")
    assert api_keys(None) == ("ours",)
    assert api_keys(["a", "b"]) == ("a", "b")


def test_an_empty_key_is_refused():
    with pytest.raises(OptionError, match="api_key"):
        ApiKeys(["good", " "])
