"""The application under uvicorn, spoken to over raw sockets: what no polite client sends."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from tests.server.scripted_engine import Served, say

pytestmark = pytest.mark.asyncio


@contextlib.asynccontextmanager
async def listening(**config: Any) -> AsyncIterator[tuple[Served, int]]:
    """A served application and its port."""
    async with Served(say("word " * 300), **config) as served:
        settings = uvicorn.Config(served.app, log_config=None, lifespan="off", http="httptools")
        server = uvicorn.Server(settings)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.001)
            yield served, listener.getsockname()[1]
            server.should_exit = True
            await task


async def exchange(port: int, *parts: bytes, end: bool = False) -> bytes:
    """What comes back until the server closes the connection, or has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            while part := await reader.read(65536):
                answer += part
                if b"\r\n\r\n" in answer and b"connection: close" not in answer.lower():
                    break
    writer.close()
    return answer


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


async def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes():
    async with listening() as (_, port):
        for length in ("1073741824", "9" * 17):
            answer = await exchange(port, head("/v1/completions", f"Content-Length: {length}"))
            assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == 413


async def test_endless_chunks_end_at_the_limit():
    async with listening(max_body_bytes=2048) as (_, port):
        chunks = [b"1\r\nx\r\n" * 512] * 64
        answer = await exchange(
            port, head("/v1/completions", "Transfer-Encoding: chunked"), *chunks
        )
        assert b" 413 " in answer or answer == b""


async def test_a_key_is_asked_for_before_the_body_is_read():
    async with listening(api_key=("k",)) as (_, port):
        answer = await exchange(port, head("/v1/completions", "Content-Length: 1000"))
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()


async def test_a_connection_is_good_after_a_refused_request():
    async with listening() as (served, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body, status in ((b"{:}", b"400"), (b"[]", b"400"), (b'{"prompt":"a"}', b"200")):
            writer.write(head("/v1/completions", f"Content-Length: {len(body)}") + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 " + status)
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            json.loads(await reader.readexactly(length))
        writer.close()
        assert len(served.process.added) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_stays_short_starts_nothing_and_is_no_fault_of_ours(path, caplog):
    async with listening() as (served, port):
        answer = await exchange(port, head(path, "Content-Length: 100"), b'{"prompt"', end=True)
        assert answer == b"" and not served.process.added
        async with asyncio.timeout(5):
            while f'handler="{path}",method="POST",status="4xx"' not in (
                shown := (await served.client.get("/metrics")).text
            ):
                await asyncio.sleep(0.01)
        assert 'status="5xx"' not in shown
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_or_reset_connection_ends_its_request(stream, resets):
    async with listening() as (served, port):
        served.process.hold()
        body = json.dumps({"prompt": ["a", "b"], "max_tokens": 900, "stream": stream}).encode()
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("/v1/completions", f"Content-Length: {len(body)}") + body)
            async with asyncio.timeout(5):
                while served.engine.num_unfinished_requests < 2:
                    await asyncio.sleep(0.001)
            if resets:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            writer.close()
            async with asyncio.timeout(5):
                while served.engine.num_unfinished_requests:
                    await asyncio.sleep(0.001)
        assert len(served.process.aborted) == 10
        assert served.app.state.server.queue.num_requests == 0


async def test_slow_readers_do_not_hold_up_others():
    async with listening() as (_, port):
        body = json.dumps({"prompt": "a", "max_tokens": 1400, "n": 4, "stream": True}).encode()
        request = head("/v1/completions", f"Content-Length: {len(body)}") + body
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        for _, writer in slow:
            writer.write(request)
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answer = b""
            while b"data: [DONE]\n\n" not in answer:
                assert (part := await reader.read(65536))
                answer += part
        for _, other in [*slow, (reader, writer)]:
            other.close()
