"""The HTTP protocol of uvicorn, with limits for headers, which httptools has none of."""

import asyncio
import json

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADERS = 100
HEADER_SECONDS = 10.0
"""A client that has not sent its headers by then is cut off."""
LINGER_SECONDS = 1.0
"""How long a refused client may go on sending before the connection is cut under its answer."""
_OF_UPGRADES = (b"upgrade", b"http2-settings")
"""Headers, and words of the header Connection, that ask for another protocol."""


def limited_protocol(max_header_bytes: int) -> type["LimitedProtocol"]:
    """A protocol class for uvicorn's `http`.

    Args:
      max_header_bytes: of the request line and all headers of one request.
    """
    return type("Limited", (LimitedProtocol,), {"max_header_bytes": max_header_bytes})


class LimitedProtocol(HttpToolsProtocol):
    """Counts what comes before a request's body, and the time it takes.

    A request for another protocol is answered in this one, as HTTP allows: clients in Java and
    `curl --http2` ask for h2c by default. The parser takes their bodies for the other protocol, so
    their headers are fed to it again without the question.
    """

    max_header_bytes: int
    _is_in_headers = True
    _is_refused = False
    _asks_upgrade = False
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
        self._unset_keepalive_if_required()
        self._parse(data)
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
        elif self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._asks_upgrade = True
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._is_refused and not self._asks_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if not self._is_refused:
            self._refuse(400, msg)

    @property
    def is_reading_body(self) -> bool:
        """Whether the newest request has begun and has neither come whole nor been answered."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_started

    def shutdown(self) -> None:
        """See uvicorn; a request that has not come whole by now is not waited for."""
        if self.is_reading_body:
            self.transport.close()
        else:
            super().shutdown()

    def _parse(self, data: bytes) -> None:
        """Feed the parser; each request that asks for an upgrade is fed twice."""
        while data and not self._is_refused:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("the request must be well-formed HTTP/1.1")
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_upgrade:
                    self.send_400_response("the request must be of HTTP/1.1, not for a tunnel")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._asks_upgrade = False
                # The old one takes nothing more if the client wants to close afterwards.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                continue
            return

    def _head_without_upgrade(self) -> bytes:
        """Request line and headers of the newest request."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _refuse_headers(self) -> None:
        limit = f"{self.max_header_bytes} bytes and {MAX_HEADERS} fields"
        self._refuse(431, f"the request line and headers must be at most {limit}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and read no further; a close with unread bytes would take the answer back."""
        self._is_refused = True
        if self.access_log:
            client = ":".join(map(str, self.client or ()))
            self.access_logger.info('%s - "%s %s HTTP/%s" %d', client, "-", "-", "1.1", status)
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
