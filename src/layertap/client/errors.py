"""Answers that are errors, as exceptions."""

import httpx

from layertap.errors import HiddenStatesError, LayertapError, MissingError


class ServerError(LayertapError):
    """The server refused a request.

    Attributes:
        status: of HTTP.
        param: the field that is to blame, or None.
        code: a word for programs, or None.
    """

    def __init__(self, message: str, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def error_of(answer: httpx.Response) -> ServerError:
    try:
        error = answer.json()["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = answer.text[:500], None, None
    return ServerError(f"{answer.status_code}: {message}", answer.status_code, param, code)


def raise_for(answer: httpx.Response) -> None:
    if answer.status_code >= 400:
        raise error_of(answer)


def raise_for_file(answer: httpx.Response, name: str) -> None:
    if answer.status_code == 404:
        raise MissingError(f"{name}: {error_of(answer)}", request_id=name)
    if answer.status_code == 410:
        reason = str(error_of(answer)).removeprefix("410: ")
        raise HiddenStatesError(f"{name}: {reason}", reason=reason, request_id=name)
    raise_for(answer)


def retry_after(answer: httpx.Response) -> float:
    try:
        return min(float(answer.headers.get("retry-after", 0)), 60.0)
    except ValueError:
        return 0.0
