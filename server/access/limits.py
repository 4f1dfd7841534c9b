"""Bounds on what is read of a request: its headers and its body."""

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from jaxserve.errors import RequestTooLargeError
from server.access.keys import Headers

MAX_HEADERS = 100
BODY_SECONDS = 60.0
"""A body that takes longer to come is not waited for."""


def check_headers(headers: Headers, max_bytes: int) -> None:
    """Refuse headers that are too many or too long.

    Raises:
      RequestTooLargeError: they are.
    """
    num_headers = num_bytes = 0
    for name, value in headers:
        num_headers += 1
        num_bytes += len(name) + len(value)
    if num_bytes > max_bytes:
        raise RequestTooLargeError(f"headers must have at most {max_bytes} bytes; got {num_bytes}")
    if num_headers > MAX_HEADERS:
        raise RequestTooLargeError(f"headers must be at most {MAX_HEADERS}; got {num_headers}")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The body of a request; no more is read than may be kept.

    Raises:
      RequestTooLargeError: it has more bytes, or says so, or does not come to its end.
      ClientDisconnect: the client has gone.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value.lstrip(b"0")) <= 18:
            _check_size(int(value), max_bytes)
        elif name == b"content-length":
            raise RequestTooLargeError("content-length must be a number of bytes")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(receive, max_bytes)
    except TimeoutError as error:
        raise RequestTooLargeError(f"body must come within {BODY_SECONDS:.0f} s") from error


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if part := message.get("body", b""):
            num_bytes += len(part)
            _check_size(num_bytes, max_bytes)
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RequestTooLargeError(f"body must have at most {max_bytes} bytes; got {num_bytes}")
