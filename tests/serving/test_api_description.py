"""The OpenAPI description is true: what schemathesis makes of it never gives a 5xx, and every answer is one that it names."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def fuzzed(make_llm, tmp_path_factory):
    llm = make_llm(tmp_path_factory.mktemp("fuzzed"))
    options = ServerSettings(allow_delete=True, allow_weight_updates=(str(tmp_path_factory.mktemp("none")),))
    with run_background(llm.front, options) as running:
        yield running


def test_no_described_request_gives_a_server_error(fuzzed):
    api = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 11
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            fuzz(operation, mode)


def fuzz(operation, mode):
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
            case.body["max_tokens"] = min(case.body["max_tokens"], 3)
        if "{name}" in operation.path or "{tag}" in operation.path:
            assume(case.path_parameters.get("name", "x") not in ("", ".", ".."))
        case.call_and_validate(checks=CHECKS)

    try:
        run()
    except Unsatisfiable:  # nothing can be wrong with a route without parameters
        assert mode is GenerationMode.NEGATIVE


def test_every_route_and_field_is_described(fuzzed, http):
    described = http.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/health",
        "/metrics",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/hidden_states/tags/{tag}",
        "/v1/hidden_states/{name}",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/weights",
    }
    for path in described["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
    assert "Error" in described["components"]["schemas"]
    assert "HTTPValidationError" not in described["components"]["schemas"]
    for name in ("CompletionBody", "ChatBody"):
        assert "kv_transfer_params" in described["components"]["schemas"][name]["properties"]
