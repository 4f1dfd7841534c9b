"""Streams that fail, fall silent or are not read."""

import asyncio
import json
from typing import Any

import pytest

from jaxserve.errors import EngineDeadError
from jaxserve.request import FinishReason, Request
from jaxserve.step import SequenceUpdate
from server import streaming
from tests.server.answers import error_of, events, strict
from tests.server.scripted_engine import Served, say

pytestmark = pytest.mark.asyncio


def fail_after(num_tokens: int, error: str):
    def script(request: Request, index: int) -> list[SequenceUpdate]:
        updates = say("abcdefgh")(request, index)[: num_tokens + 1]
        failed = SequenceUpdate(
            request_id=request.request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            error=error,
        )
        return [*updates[:-1], failed]

    return script


async def test_a_failed_sequence_is_an_error_of_its_request_only():
    async with Served(fail_after(3, "the logits held NaN")) as served:
        for ask in (served.chat, served.complete):
            assert error_of(await ask(), 500) == "the logits held NaN"
            data = events(await ask(stream=True))
            assert strict(data[-2])["error"]["message"] == "the logits held NaN"
            assert data[-1] == "[DONE]"
            assert strict(data[-3])["choices"][0]["finish_reason"] is None
        assert (await served.client.get("/health")).status_code == 200


async def test_an_engine_that_dies_ends_streams_with_an_error_and_answers_503():
    async with Served() as served:
        served.process.hold()
        running = [
            asyncio.create_task(ask(stream=stream))
            for ask in (served.chat, served.complete)
            for stream in (False, True)
        ]
        while len(served.process.added) < 4:
            await asyncio.sleep(0.001)
        served.process.tell(EngineDeadError("killed: /secret/path"))
        for task, stream in zip(running, (False, True, False, True), strict=True):
            response = await task
            if not stream:
                error_of(response, 503)
                continue
            data = events(response)
            assert data[-1] == "[DONE]"
            assert strict(data[-2])["error"]["code"] == 503 and "secret" not in response.text


async def test_an_error_of_ours_inside_a_stream_is_an_event_too(monkeypatch, caplog):
    async with Served() as served:
        for name in ("chat_answers.ChatStream", "completion_answers.CompletionStream"):
            monkeypatch.setattr(f"server.protocol.{name}.last_events", lambda self: 1 / 0)
        for ask in (served.chat, served.complete):
            data = events(await ask(stream=True))
            assert strict(data[-2])["error"]["message"] == "internal server error"
            assert data[-1] == "[DONE]"
    assert "ZeroDivisionError" in caplog.text


async def test_silence_is_filled_with_comments_when_asked_for():
    async with Served(sse_keep_alive_interval=0.01) as served:
        served.process.hold()
        running = asyncio.create_task(served.chat(stream=True))
        await asyncio.sleep(0.1)
        served.process.release()
        text = (await running).text
        assert text.startswith(": keep-alive\n\n")
        assert text.rstrip().endswith("data: [DONE]")
        assert len(asyncio.all_tasks()) <= 4


async def test_a_client_that_takes_nothing_is_left(monkeypatch):
    monkeypatch.setattr(streaming, "STALLED_WRITE_SECONDS", 0.05)
    async with Served() as served:
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return inbox.pop() if inbox else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                served.process.hold()
                await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope |= {"query_string": b"", "root_path": ""}
        await asyncio.wait_for(served.app(scope, receive, send), 5)
        assert served.engine.num_unfinished_requests == 0 and len(served.process.aborted) == 1
