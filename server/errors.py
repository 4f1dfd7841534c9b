"""From errors to HTTP: the one place that knows statuses and the shape that clients read."""

import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Scope

from jaxserve.errors import (
    AuthenticationError,
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    JaxServeError,
    ModelNotFoundError,
    QueueFullError,
    QueueTimeoutError,
    RequestTooLargeError,
    RowError,
)

logger = logging.getLogger(__name__)

RETRY_START_SECONDS = 5
"""Retry-After of a server that starts or leaves."""


class DrainingError(EngineNotReadyError):
    """The server is about to leave and takes no new requests."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one kind of error is answered.

    Attributes:
      status: of HTTP.
      type: as vLLM names it.
      headers: of the answer.
      message: shown instead of the error's own, which may tell of this machine.
    """

    status: int
    type: str
    headers: dict[str, str] = field(default_factory=dict)
    message: str | None = None


_INTERNAL = ErrorKind(500, "InternalServerError", message="internal server error")
_RETRY_START = {"Retry-After": str(RETRY_START_SECONDS)}
_KINDS: dict[type[JaxServeError], ErrorKind] = {
    InvalidRequestError: ErrorKind(400, "BadRequestError"),
    RequestTooLargeError: ErrorKind(413, "RequestTooLargeError", {"Connection": "close"}),
    AuthenticationError: ErrorKind(401, "AuthenticationError", {"WWW-Authenticate": "Bearer"}),
    ModelNotFoundError: ErrorKind(404, "NotFoundError"),
    QueueFullError: ErrorKind(429, "TooManyRequestsError"),
    QueueTimeoutError: ErrorKind(503, "ServiceUnavailableError"),
    DrainingError: ErrorKind(
        503, "ServiceUnavailableError", {**_RETRY_START, "Connection": "close"}
    ),
    EngineNotReadyError: ErrorKind(503, "ServiceUnavailableError", _RETRY_START),
    EngineDeadError: ErrorKind(
        503, "ServiceUnavailableError", message="the engine has stopped; see the server's log"
    ),
    RowError: ErrorKind(500, "InternalServerError"),
}


def error_kind(error: Exception) -> ErrorKind:
    """How an error is answered; one that is none of ours is an internal one."""
    for cls in type(error).__mro__:
        if cls in _KINDS:
            return _KINDS[cls]
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase.replace(" ", "")
        name = "NotFoundError" if error.status_code == 404 else f"{phrase}Error"
        return ErrorKind(error.status_code, name, dict(error.headers or {}))
    return _INTERNAL


def error_body(error: Exception) -> dict[str, Any]:
    """The object that clients get: {"error": {message, type, param, code}}."""
    kind = error_kind(error)
    message = kind.message
    if message is None:
        message = error.detail if isinstance(error, HTTPException) else str(error)
    parameter = getattr(error, "parameter", None)
    if isinstance(error, ModelNotFoundError):
        parameter = "model"
    return {
        "error": {"message": message, "type": kind.type, "param": parameter, "code": kind.status}
    }


def error_json(error: Exception) -> bytes:
    """The same as JSON; what a client sent may hold half a surrogate pair, and JSON may not."""
    body = error_body(error)
    details = body["error"]
    for name in ("message", "param"):
        if details[name] is not None:
            details[name] = details[name].encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode(body)


def error_response(error: Exception) -> Response:
    """The answer to a request that failed before anything was sent."""
    kind = error_kind(error)
    headers = {**kind.headers, "content-type": "application/json"}
    if isinstance(error, QueueFullError | QueueTimeoutError):
        headers["Retry-After"] = str(error.retry_seconds)
    return Response(error_json(error), kind.status, headers)


def error_events(error: Exception) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + error_json(error) + b"\n\ndata: [DONE]\n\n"


def has_body(scope: Scope) -> bool:
    """Whether a request has a body; where it is not read, the connection cannot be used again."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        error.detail = f"{request.method} {request.url.path[:200]} is not a route of this server"
    elif error.status_code == 405:
        error.detail = f"{request.method} is not allowed here"
    response = error_response(error)
    if has_body(request.scope):
        response.headers["connection"] = "close"
    return response


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


EXCEPTION_HANDLERS: dict[Any, ExceptionHandler] = {
    ClientDisconnect: _answer_nobody,
    JaxServeError: _answer,
    HTTPException: _answer_http,
    Exception: _answer,
}
"""For Starlette; an unknown exception is also raised again, so that the log has its trace."""
