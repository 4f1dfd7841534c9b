"""Clients that leave: their requests end in the engine, whatever they do, and no task is left."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.streaming import merge_streams
from tests.server.scripted_engine import Served, say

pytestmark = pytest.mark.asyncio
COMMON = {"n": 2, "max_tokens": 900}
PATHS = {
    "/v1/completions": {"prompt": ["a", "b", "c"], **COMMON},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **COMMON},
}
NUM_REQUESTS = {"/v1/completions": 3, "/v1/chat/completions": 1}


class Client:
    """One connection, seen from below HTTP: it can leave at any moment."""

    def __init__(self, served: Served, path: str, *, cuts_body: bool = False, **fields: Any):
        self.messages: list[Any] = []
        self._gone = asyncio.Event()
        body = json.dumps({**PATHS[path], **fields}).encode()
        parts = [body[:10]] if cuts_body else [body[:10], body[10:]]
        self._parts = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
        if not cuts_body:
            self._parts[-1]["more_body"] = False
        scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
        scope |= {"headers": [], "query_string": b""}
        self.task = asyncio.create_task(served.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._parts:
            return self._parts.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._gone.is_set():
            self.messages.append(message)

    def leave(self) -> None:
        self._gone.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def check_all_ended(served: Served, client: Client, num_requests: int) -> None:
    """Nothing of a client that left is left: in the engine, in the queue, nor as a task."""
    await asyncio.wait_for(client.task, 5)
    assert served.engine.num_unfinished_requests == 0
    assert served.app.state.server.queue.num_requests == 0
    assert sorted(served.process.aborted) == sorted(m.request_id for m in served.process.added)
    assert len(served.process.aborted) == num_requests
    await asyncio.sleep(0)
    names = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    assert names == {"engine news"}, names


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_while_it_waits_ends_all_its_requests(path, stream):
    async with Served() as served:
        served.process.hold()
        client = Client(served, path, stream=stream)
        await until(lambda: len(served.process.added) == NUM_REQUESTS[path])
        client.leave()
        await check_all_ended(served, client, NUM_REQUESTS[path])
        assert not stream or len(client.messages) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_in_the_middle_ends_all_its_requests(path, stream):
    async with Served(say("word " * 200)) as served:
        client = Client(served, path, stream=stream)
        await until(lambda: served.process.num_told > 12)
        served.process.hold()
        client.leave()
        await check_all_ended(served, client, NUM_REQUESTS[path])
        if stream:
            assert len(client.messages) > 1
            assert not any(m.get("body", b"").endswith(b"[DONE]\n\n") for m in client.messages)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_while_its_text_is_prepared_starts_nothing(
    path, stream, monkeypatch
):
    async with Served() as served:
        is_preparing = asyncio.Event()

        async def prepare(*_: Any, **__: Any) -> Any:
            is_preparing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(served.engine, "prepare_chat", prepare)
        monkeypatch.setattr(served.engine, "prepare_prompts", prepare)
        client = Client(served, path, stream=stream)
        await is_preparing.wait()
        client.leave()
        await check_all_ended(served, client, 0)
        assert not client.messages


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_inside_its_body_starts_nothing(path):
    async with Served() as served:
        client = Client(served, path, stream=True, cuts_body=True)
        client.leave()
        await check_all_ended(served, client, 0)
        assert not client.messages


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_after_the_end_aborts_nothing(path):
    async with Served() as served:
        client = Client(served, path, stream=True)
        await asyncio.wait_for(client.task, 5)
        client.leave()
        await asyncio.sleep(0.01)
        assert not served.process.aborted and served.engine.num_unfinished_requests == 0
        assert client.messages[-1]["body"].endswith(b"[DONE]\n\n")


async def test_a_choice_that_has_ended_does_not_keep_the_others_from_being_ended():
    def script(request: Any) -> str:
        return "a" if len(request.prompt_token_ids) == 1 else "long " * 100

    async with Served(say(script)) as served:
        prompts = {"prompt": ["a", "bbb"], "n": 1, "max_tokens": 400}
        client = Client(served, "/v1/completions", stream=True, **prompts)
        await until(lambda: any(b'"stop"' in m.get("body", b"") for m in client.messages))
        served.process.hold()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        assert served.process.aborted == [served.process.added[1].request_id]


async def test_a_hundred_clients_that_leave_do_not_harm_those_who_stay():
    async with Served(say("word " * 40)) as served:
        quiet = (await served.complete("stay", max_tokens=150)).json()["choices"][0]["text"]
        staying = [asyncio.create_task(served.complete("stay", max_tokens=150)) for _ in range(4)]
        clients = [
            Client(served, path, stream=stream)
            for path in PATHS
            for stream in (False, True)
            for _ in range(25)
        ]
        for number, client in enumerate(clients):
            if number % 5 == 0:
                await asyncio.sleep(0.001)
            client.leave()
        await asyncio.gather(*(client.task for client in clients))
        for task in staying:
            assert (await task).json()["choices"][0]["text"] == quiet
        assert served.engine.num_unfinished_requests == 0
        assert served.app.state.server.queue.num_requests == 0


async def test_an_error_in_one_of_several_streams_ends_the_others():
    closed: list[int] = []

    async def stream(number: int) -> AsyncIterator[Any]:
        try:
            yield number
            if number == 1:
                raise RuntimeError("broken")
            await asyncio.Event().wait()
        finally:
            closed.append(number)

    seen: list[Any] = []
    with pytest.raises(RuntimeError, match="broken"):
        streams: Any = [stream(number) for number in range(3)]
        async for item in merge_streams(streams):
            seen.append(item)
    assert sorted(closed) == [0, 1, 2] and (1, 1) in seen
