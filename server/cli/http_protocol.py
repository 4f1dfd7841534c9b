"""The HTTP protocol of uvicorn, with limits for headers, which httptools has none of."""

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADERS = 100
HEADER_SECONDS = 10.0
"""A client that has not sent its headers by then is cut off."""
LINGER_SECONDS = 1.0
"""How long a refused client may go on sending before the connection is cut under its answer."""


def limited_protocol(max_header_bytes: int) -> type["LimitedProtocol"]:
    """A protocol class for uvicorn's `http`.

    Args:
      max_header_bytes: of the request line and all headers of one request.
    """
    return type("Limited", (LimitedProtocol,), {"max_header_bytes": max_header_bytes})


class LimitedProtocol(HttpToolsProtocol):
    """Counts what comes before a request's body, and the time it takes."""

    max_header_bytes: int
    _is_in_headers = True
    _is_refused = False
    _num_header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See asyncio."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio; what follows a refusal is dropped."""
        if self._is_refused or self.transport.is_closing():
            return
        self._num_header_bytes += len(data)
        super().data_received(data)
        if not self._is_in_headers or self.transport.is_closing():
            return
        self._start_timer()
        if self._num_header_bytes > self.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """A request begins; a body may stand before it in the same bytes, so they do not count."""
        super().on_message_begin()
        self._is_in_headers, self._num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Let the application begin, unless the headers are over a limit."""
        self._is_in_headers = False
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers)
        if num_bytes > self.max_header_bytes or len(self.headers) > MAX_HEADERS:
            self._refuse_headers()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if not self._is_refused:
            self._refuse(400, msg)

    def _refuse_headers(self) -> None:
        limit = f"{self.max_header_bytes} bytes and {MAX_HEADERS} fields"
        self._refuse(431, f"the request line and headers must be at most {limit}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and read no further; a close with unread bytes would take the answer back."""
        self._is_refused = True
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        length = str(len(body)).encode()
        self.transport.write(STATUS_LINE[status] + head + length + b"\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self._close)

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
