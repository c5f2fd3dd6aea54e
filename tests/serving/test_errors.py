"""Errors: OpenAI's form, the field that is to blame, and nothing generated."""

import json

import pytest
from waiting import wait_until_at_rest

GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 1}


def post(http, **body):
    content = json.dumps({**GOOD, **body})  # in ASCII, so that a lone surrogate gets through
    return http.post("/v1/completions", content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "served: tiny"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": []}, 400, "prompt", "at least 1"),
        ({"prompt": ["ok", ""]}, 400, "prompt[1]", "empty"),
        ({"prompt": [1, "a"]}, 400, "prompt", "text, token ids"),
        ({"prompt": [5000]}, 400, "prompt", "vocabulary"),
        ({"prompt": [-1]}, 400, "prompt.0", "0"),
        ({"prompt": "x" * 5000}, 400, "prompt", "length"),
        ({"prompt": "\ud800"}, 400, "prompt", ""),
        ({"temprature": 1.0}, 400, "temprature", "temperature"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "isn't a field of this endpoint"),
        ({"temperature": 9}, 400, "temperature", "2"),
        ({"temperature": "1"}, 400, "temperature", "number"),
        ({"max_tokens": 0}, 400, "max_tokens", "1"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "integer"),
        ({"n": 0}, 400, "n", "1"),
        ({"n": 10**9}, 400, "n", "128"),
        ({"n": 2, "temperature": 0}, 400, "n", "temperature 0"),
        ({"best_of": 3}, 400, "best_of", "n"),
        ({"suffix": "x"}, 400, "suffix", ""),
        ({"logprobs": 21}, 400, "logprobs", "20"),
        ({"echo": True, "logprobs": 1}, 400, "echo", ""),
        ({"stop": [""]}, 400, "stop.0", ""),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", "whole number"),
        ({"allowed_token_ids": [999999]}, 400, "allowed_token_ids", "vocabulary"),
        ({"kv_transfer_params": {"layer": [1]}}, 400, "kv_transfer_params", "'layers'"),
        ({"kv_transfer_params": {"layers": [99]}}, 400, None, "99"),
        ({"kv_transfer_params": {"layers": [1, 1]}}, 400, None, "1"),
        ({"kv_transfer_params": {"positions": [0, 99]}}, 400, "kv_transfer_params.positions", "outside"),
        ({"kv_transfer_params": {"tag": "../x"}}, 400, "kv_transfer_params.tag", ""),
        (
            {"kv_transfer_params": {"include_output_tokens": "yes"}},
            400,
            "kv_transfer_params.include_output_tokens",
            "true",
        ),
        ({"kv_transfer_params": []}, 400, "kv_transfer_params", "dictionary"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream=true"),
    ],
)
def test_bad_bodies_are_refused_before_anything_runs(http, server, storage, body, status, param, words):
    wait_until_at_rest(server)
    before = sorted(storage.iterdir())
    answer = post(http, **body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert words in error["message"]
    assert error["type"]
    if param is not None:
        assert error["param"] == param, error
    assert sorted(storage.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "missing"),
        (b"{", "isn't JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe{", "isn't JSON in UTF-8: 'utf-16"),
        (b'{"prompt": "\xff"}', "isn't JSON in UTF-8: 'utf-8' codec can't decode byte 0xff in position 12"),
        (b'{"prompt": ' + b"[" * 100_000, "isn't JSON in UTF-8: nested too deeply"),
    ],
)
def test_what_isnt_json_is_a_400_that_says_why(http, content, words):
    answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_body_without_its_content_type_is_told_so(http):
    answer = http.post("/v1/completions", content=b'{"prompt": "x"}')
    assert (answer.status_code, "Content-Type" in answer.json()["error"]["message"]) == (400, True)


def test_routes_that_dont_exist_say_so_in_the_same_form(http):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        answer = http.request(method, path)
        assert answer.status_code == status
        assert path in answer.json()["error"]["message"]


def test_a_used_tag_is_refused(http):
    assert post(http, kv_transfer_params={"tag": "used-once"}).status_code == 200
    again = post(http, kv_transfer_params={"tag": "used-once"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "kv_transfer_params.tag")
