"""Makes an app say every error in OpenAI's form."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from layertap.serving.api_errors import ApiError, from_exception, from_validation
from layertap.serving.schemas import ChatBody, CompletionBody, StreamOptions

_UNREADABLE_BODY = "There was an error parsing the body"
"""What FastAPI says of bytes that aren't text, whatever is the matter."""
_NO_BODY = {"304", "499"}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

logger = logging.getLogger(__name__)

_KNOWN_FIELDS = {model.__name__: list(model.model_fields) for model in (CompletionBody, ChatBody, StreamOptions)}


def add_error_handlers(app: FastAPI) -> None:
    """Say every error in OpenAI's form."""

    async def api_error(_request: Request, exc: Exception) -> Response:
        return from_exception(exc).response()

    async def invalid(_request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return from_validation(exc.errors(), _KNOWN_FIELDS).response()

    async def http_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        if exc.detail == _UNREADABLE_BODY:
            why = "nested too deeply" if isinstance(exc.__cause__, RecursionError) else exc.__cause__
            return ApiError(400, f"the body isn't JSON in UTF-8: {why}", code="invalid_value").response()
        detail = f"{request.method} {request.url.path}: {exc.detail}"
        return ApiError(exc.status_code, detail, headers=exc.headers).response()

    async def unexpected(request: Request, exc: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
        answer = from_exception(exc).response()
        # the server closes it after such an error: a request that was sent on it meanwhile would be lost
        answer.headers["connection"] = "close"
        return answer

    _describe_errors(app)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)


def _describe_errors(app: FastAPI) -> None:
    """Put the errors' form into the OpenAPI description, and 400 where FastAPI supposes its own 422."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        described = original()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = _ERROR_SCHEMA
        for path in described["paths"].values():
            for method, operation in path.items():
                _describe_operation(operation["responses"], has_bodies=method != "head")
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _describe_operation(responses: dict[str, Any], *, has_bodies: bool) -> None:
    if responses.pop("422", None) is not None:
        responses.setdefault("400", {"description": "A parameter is wrong; `error.param` names it."})
    for status, answer in responses.items():
        if status >= "4" and status not in _NO_BODY and has_bodies:
            answer["content"] = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
