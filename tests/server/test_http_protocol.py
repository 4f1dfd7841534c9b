"""Tests of server/cli/http_protocol.py and http_server.py, over real sockets."""

import asyncio
import json
import logging
from typing import Any

import pytest

from server.cli import http_protocol
from server.cli.http_server import make_http_server
from server.cli.listening import open_listener
from server.config import ServerConfig

LIMIT = 2048


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Tells how many bytes of body it got."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = b"%d" % num_bytes
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def talk(*pieces: bytes, config: ServerConfig | None = None, silent: tuple[str, ...] = ()) -> bytes:
    """Send pieces with pauses between them; all that comes back until the server closes."""

    async def run() -> bytes:
        listener = open_listener("127.0.0.1", 0, None)
        server = make_http_server(app, config or ServerConfig(max_header_bytes=LIMIT), silent)
        serving = asyncio.create_task(server.serve([listener.socket]))
        port = listener.socket.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.03)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        server.stop()
        await serving
        return answer

    return asyncio.run(run())


def request(*headers: bytes, body: bytes = b"", path: bytes = b"/") -> bytes:
    fixed = [b"host: x", b"connection: close", b"content-length: %d" % len(body)]
    head = b"\r\n".join([b"POST %s HTTP/1.1" % path, *fixed, *headers])
    return head + b"\r\n\r\n" + body


def refusal(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status) and b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"], error["param"]) == (status, "BadRequestError", None)
    return error["message"]


def test_headers_within_the_limits_reach_the_application_however_they_are_cut():
    headers = [b"x%d: %s" % (i, b"a" * 10) for i in range(90)]
    whole = request(*headers, body=b"12345")
    assert talk(whole).endswith(b"\r\n\r\n5")
    assert talk(whole[:700], whole[700:1500], whole[1500:]).endswith(b"\r\n\r\n5")


def test_a_body_does_not_count_as_headers():
    body = b"b" * (5 * LIMIT)
    assert talk(request(body=body)).endswith(b"%d" % len(body))
    first = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    answer = talk(first + request(body=b"12")[:30], request(body=b"12")[30:])
    assert answer.count(b"HTTP/1.1 200") == 2 and answer.endswith(b"\r\n\r\n2")


@pytest.mark.parametrize("is_cut", [False, True])
def test_too_many_bytes_of_headers_are_refused(is_cut):
    whole = request(b"x: " + b"a" * LIMIT)
    pieces = [whole[:LIMIT], whole[LIMIT:]] if is_cut else [whole]
    message = refusal(talk(*pieces), 431)
    assert message == "the request line and headers must be at most 2048 bytes and 100 fields"


def test_headers_without_an_end_are_refused_when_they_are_too_many_and_nothing_more_is_read():
    pieces = [b"GET / HTTP/1.1\r\n", b"x: " + b"a" * 1500, b"a" * 1500, b"a" * 100_000, b"a" * 9]
    refusal(talk(*pieces), 431)


def test_too_many_fields_are_refused():
    refusal(talk(request(*[b"x: 1"] * 98)), 431)
    assert talk(request(*[b"x: 1"] * 97)).startswith(b"HTTP/1.1 200")


def test_a_long_path_counts_too():
    refusal(talk(request(path=b"/" + b"p" * LIMIT)), 431)


def test_what_is_no_http_is_refused_in_the_same_form():
    message = refusal(talk(b"\x00\x01\x02 hello\r\n\r\n"), 400)
    assert message == "the request must be well-formed HTTP/1.1"


def h2c(body: bytes, *, connection: bytes = b"Upgrade, HTTP2-Settings") -> bytes:
    """A request as `curl --http2` and Java's HttpClient send it."""
    headers = [b"connection: " + connection, b"upgrade: h2c", b"http2-settings: AAMAAABkAAQ"]
    head = [b"POST / HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_the_body_of_a_request_that_asks_for_another_protocol_is_read():
    first, last = h2c(b"12345"), request(body=b"12")
    for pieces in ([first + last], [first[:-5], first[-5:], last], [first[:40], first[40:], last]):
        answer = talk(*pieces)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert b"\r\n\r\n5HTTP" in answer and answer.endswith(b"\r\n\r\n2")
    assert talk(h2c(b"1") * 3 + last).count(b"HTTP/1.1 200") == 4
    assert talk(h2c(b"1", connection=b"upgrade, close")).endswith(b"\r\n\r\n1")


def test_upgrades_are_held_to_the_limits_and_tunnels_are_refused():
    first = h2c(b"12345")
    refusal(talk(first.replace(b"host: x", b"host: " + b"x" * LIMIT)), 431)
    refusal(talk(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n"), 400)


def test_what_clients_do_wrong_is_one_line_of_the_access_log_and_no_warning(caplog):
    with caplog.at_level(logging.INFO):
        talk(b"hello\r\n\r\n")
        talk(request(b"x: " + b"a" * LIMIT))
        talk(h2c(b"1", connection=b"upgrade, close"))
    lines = [record.getMessage().partition(" - ")[2] for record in caplog.records]
    expected = ['"- - HTTP/1.1" 400', '"- - HTTP/1.1" 431', '"POST / HTTP/1.1" 200']
    assert [line for line in lines if line] == expected
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]


def test_a_client_that_does_not_send_its_headers_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.2)
    assert talk(b"GET / HTTP/1.1\r\n", b"x: 1\r\n") == b""
    assert talk() == b""
    slow_body = request(body=b"12345")
    pieces = [slow_body[:-5], *[b"1"] * 5, b"", b"", b"", b"", b""]
    assert talk(*pieces).endswith(b"\r\n\r\n5"), "the time is the headers' alone"


def test_the_access_log_shows_no_query_and_not_the_silent_paths(caplog):
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        talk(request(path=b"/v1/models?api_key=sk-secret"), silent=("/health",))
        talk(request(path=b"/health?x"), silent=("/health",))
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert len(lines) == 1 and lines[0].endswith('- "POST /v1/models HTTP/1.1" 200')


def test_the_access_log_can_be_switched_off(caplog):
    with caplog.at_level(logging.INFO):
        talk(request(), config=ServerConfig(disable_uvicorn_access_log=True))
    assert not [record for record in caplog.records if record.name == "uvicorn.access"]
