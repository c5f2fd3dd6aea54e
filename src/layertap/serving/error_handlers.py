"""Makes an app say every error in OpenAI's form."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from layertap.serving.api_errors import ApiError, from_exception, from_validation
from layertap.serving.schemas import ChatBody, CompletionBody, StreamOptions

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
        detail = f"{request.method} {request.url.path}: {exc.detail}"
        return ApiError(exc.status_code, detail, headers=exc.headers).response()

    async def unexpected(request: Request, exc: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
        return from_exception(exc).response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
