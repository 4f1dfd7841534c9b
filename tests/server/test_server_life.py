"""Tests of server/cli/server_life.py, with an engine that only pretends and a real HTTP server."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jaxserve.async_llm_engine import EngineState
from jaxserve.errors import EngineDeadError
from server.cli import server_life
from server.cli.failures import CommandError
from server.cli.http_server import make_http_server
from server.cli.listening import Listener, open_listener
from server.cli.server_life import ServerLife
from server.config import ServerConfig


class FakeEngine:
    """An engine whose state a test sets."""

    def __init__(self):
        self.state, self.progress = EngineState.NEW, ("load", 0, 1)
        self.error: EngineDeadError | None = None
        self.is_refused = False
        self.num_unfinished_requests = 0
        self.calls: list[str] = []

    async def start(self) -> None:
        self.state = EngineState.STARTING

    def die(self, message: str, *, is_refused: bool = False) -> None:
        self.state, self.is_refused = EngineState.DEAD, is_refused
        self.error = EngineDeadError(message)

    def kill(self) -> None:
        self.calls.append("kill")
        self.die("killed")

    async def close(self) -> None:
        self.calls.append("close")
        self.state = EngineState.DEAD


class World:
    """One life under test: its engine, its application, and its address."""

    def __init__(self):
        self.engine = FakeEngine()
        self.state = SimpleNamespace(is_draining=False)
        self.status: int | None = None
        self.may_answer = asyncio.Event()
        self.listener: Listener = open_listener("127.0.0.1", 0, None)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers /slow when the test lets it, and tells then whether the engine was dead."""
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/slow":
            while not self.may_answer.is_set() and self.engine.state is not EngineState.DEAD:
                await asyncio.sleep(0.01)
        text = f"{self.engine.state} draining={self.state.is_draining}".encode()
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def get(self, path: str) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(self.listener.address + path, timeout=20)).text


def live(act: Callable[[World], Awaitable[None]], drain_seconds: float = 20.0) -> World:
    """Run a life while `act` acts on it; `world.status` is its exit status."""

    async def acted(world: World) -> None:
        try:
            await act(world)
        except BaseException:
            world.engine.die("the test has failed")
            raise

    async def run() -> World:
        world = World()
        http = make_http_server(world.app, ServerConfig(), ())
        life = ServerLife(world.engine, http, world.state, drain_seconds)  # pyright: ignore[reportArgumentType]
        acting = asyncio.create_task(acted(world))
        try:
            world.status = await life.run(world.listener)
        finally:
            await acting
            world.listener.close()
        return world

    return asyncio.run(run())


async def become_ready(world: World) -> None:
    await until(lambda: world.engine.state is EngineState.STARTING)
    world.engine.state = EngineState.READY
    assert await world.get("/") == "ready draining=False"


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


def send_signal(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_status_is_0(number):
    answers: list[str] = []

    async def act(world: World) -> None:
        await become_ready(world)
        slow = asyncio.create_task(world.get("/slow"))
        await asyncio.sleep(0.2)
        send_signal(number)
        await until(lambda: world.state.is_draining)
        answers.append(await world.get("/"))
        world.may_answer.set()
        answers.append(await slow)

    world = live(act)
    assert world.status == 0 and world.engine.calls == ["close"]
    assert answers == ["ready draining=True"] * 2, "requests are answered while others drain"


def test_what_is_not_finished_in_time_is_ended_with_the_engine():
    answers: list[str] = []

    async def act(world: World) -> None:
        await become_ready(world)
        slow = asyncio.create_task(world.get("/slow"))
        await asyncio.sleep(0.2)
        send_signal()
        answers.append(await slow)

    world = live(act, drain_seconds=0.3)
    assert world.status == 0 and answers == ["dead draining=True"]


def test_a_body_that_does_not_come_is_not_waited_for(caplog):
    answers: list[bytes] = []

    async def act(world: World) -> None:
        await become_ready(world)
        host, port = world.listener.socket.getsockname()[:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        await asyncio.sleep(0.2)
        send_signal()
        answers.append(await reader.read())
        writer.close()

    start = time.monotonic()
    with caplog.at_level(logging.INFO, "server.cli.server_life"):
        world = live(act)
    assert world.status == 0 and answers == [b""] and time.monotonic() - start < 10
    assert "drained: all requests are finished" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_second_signal_kills_the_engine_and_leaves(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr(server_life.os, "_exit", left.append)

    async def act(world: World) -> None:
        await become_ready(world)
        slow = asyncio.create_task(world.get("/slow"))
        await asyncio.sleep(0.2)
        send_signal()
        await until(lambda: world.state.is_draining)
        send_signal()
        assert await slow == "dead draining=True"
        await until(lambda: bool(left))

    world = live(act)
    assert left == [128 + signal.SIGTERM] == [world.status]
    assert "kill" in world.engine.calls


def test_a_dead_engine_tells_its_clients_and_ends_the_process_with_status_1():
    answers: list[str] = []

    async def act(world: World) -> None:
        await become_ready(world)
        slow = asyncio.create_task(world.get("/slow"))
        await asyncio.sleep(0.2)
        world.engine.die("the engine process has ended by signal 9")
        answers.append(await slow)

    world = live(act)
    assert world.status == 1 and answers == ["dead draining=False"]


@pytest.mark.parametrize(("is_refused", "status"), [(True, 2), (False, 1)])
def test_an_engine_that_does_not_start_is_told_with_its_own_words(is_refused, status):
    async def act(world: World) -> None:
        await until(lambda: world.engine.state is EngineState.STARTING)
        world.engine.die("dtype must fit the device", is_refused=is_refused)

    with pytest.raises(CommandError, match="^dtype must fit the device$") as caught:
        live(act)
    assert caught.value.status == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_at_the_start_leaves_at_once_and_kills_the_engine(number, status):
    async def act(world: World) -> None:
        await until(lambda: world.engine.state is EngineState.STARTING)
        send_signal(number)

    world = live(act)
    assert world.status == status and world.engine.calls[0] == "kill"
