"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`, with the status that a client can act on."""

import difflib
import errno
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from layertap.errors import (
    EngineError,
    HiddenStatesError,
    OptionError,
    PromptError,
    StoreFullError,
    TargetExistsError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    507: "insufficient_storage_error",
}
_PARAM = re.compile(r"([a-z_][a-z0-9_.\[\]]*): ")
_CLIENTS_PATH = {
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.EINVAL,
}


class ApiError(Exception):
    """An answer that isn't the one that was asked for.

    Attributes:
        status: of HTTP.
        param: the field of the request that is to blame.
        code: a word for programs.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def from_exception(exc: BaseException, *, path_is_the_clients: bool = False) -> ApiError:
    """Say an exception of the core to an HTTP client.

    Args:
        exc: what was raised.
        path_is_the_clients: the request named its own path, so a path that can't be written to is the request's fault.
    """
    if isinstance(exc, ApiError):
        return exc
    message = str(exc) or type(exc).__name__
    if isinstance(exc, OSError) and exc.errno is not None:  # without Python's "[Errno 17]"
        said = exc.strerror or message
        message = said if exc.filename is None else f"{exc.filename}: {said}"
    if isinstance(exc, StoreFullError):
        return ApiError(507, message, code="store_full")
    if isinstance(exc, TargetExistsError):
        return ApiError(409, message, param="kv_transfer_params.hidden_states_path", code="target_exists")
    if isinstance(exc, OptionError | PromptError | UnicodeError):
        match = _PARAM.match(message)
        return ApiError(400, message, param=match[1] if match else None, code="invalid_value")
    if isinstance(exc, OSError) and not isinstance(exc, HiddenStatesError):
        if exc.errno == errno.ENOSPC:
            return ApiError(507, f"the store is full: {message}", code="store_full")
        if path_is_the_clients and exc.errno in _CLIENTS_PATH:
            return ApiError(400, message, param="kv_transfer_params.hidden_states_path", code="invalid_value")
        return ApiError(500, f"the store can't be written to: {message}", code="store_error")
    if isinstance(exc, EngineError):
        cause: BaseException | None = exc.__cause__
        if isinstance(cause, OptionError | PromptError):
            return from_exception(cause)
        return ApiError(500, message, code="engine_error")
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]], known: Mapping[str, Sequence[str]]) -> ApiError:
    """Say what is wrong with a body.

    Args:
        errors: of pydantic.
        known: fields by the name of the model, for "did you mean".
    """
    # a union reports each of its members: the one that came closest has a value, not a type, that is wrong
    field = _place(errors[0])[:1]
    same = [error for error in errors if _place(error)[:1] == field]
    first = next((error for error in same if not str(error.get("type")).endswith("_type")), errors[0])
    place = _place(first)
    param = ".".join(place) or None
    message = str(first.get("msg", "invalid"))
    if first.get("type") == "extra_forbidden":
        name = place[-1]
        fields = {field for fields in known.values() for field in fields}
        near = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
        if name in fields:
            message = "isn't a field of this endpoint"
        else:
            message = "unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
    elif place[:1] == ["prompt"] and first is errors[0] and len(same) > 1:
        param = "prompt"
        message = "expected text, token ids, or a list of them"
    elif first.get("type") == "model_attributes_type" and not place:
        message = "the body isn't a JSON object; it needs the header 'Content-Type: application/json', too"
    elif first.get("type") == "missing" and not place:
        message = "the body is missing; it has to be a JSON object, with the header 'Content-Type: application/json'"
    elif first.get("type") == "json_invalid":
        message = f"the body isn't JSON: {first.get('ctx', {}).get('error', message)}"
        param = None
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def _place(error: Mapping[str, Any]) -> list[str]:
    """Where in the request an error is, without the names of a union's members."""
    parts = [str(part) for part in error.get("loc", ())]
    return [
        part
        for part in parts
        if part not in ("body", "query", "path", "str") and "[" not in part and not part.startswith("constrained-")
    ]
