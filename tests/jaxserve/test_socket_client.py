"""SocketClient with small programs in the engine's place, on both kinds of event loops."""

import asyncio
import contextlib
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest
import uvloop

from jaxserve.config import EngineConfig
from jaxserve.distributed import socket_client
from jaxserve.distributed.messages import StartRefused
from jaxserve.distributed.socket_client import SocketClient
from jaxserve.errors import EngineDeadError

PROGRAM = """
import os, signal, socket, sys, time
from jaxserve.distributed.messages import *
connection = socket.socket(fileno=int(sys.argv[1]))
stream = connection.makefile("rb")
def read():
    header = stream.read(HEADER_BYTES)
    return decode_to_engine(stream.read(frame_length(header))) if header else None
start = read()
"""

type Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request) -> Run:
    make_loop = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_in_loop(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(asyncio.wait_for(work, 30))  # pyright: ignore[reportArgumentType]

    return run_in_loop


@pytest.fixture
def start(monkeypatch):
    """Starts a program in the engine's place."""

    async def start_program(program: str, config: EngineConfig | None = None) -> SocketClient:
        words = [sys.executable, "-P", "-c", PROGRAM + textwrap.dedent(program)]
        monkeypatch.setattr(socket_client, "_command", lambda number: [*words, str(number)])
        return await SocketClient.start(config or EngineConfig())

    return start_program


@pytest.mark.parametrize(
    ("end", "shown"),
    [("sys.exit(3)", "with status 3"), ("os.kill(os.getpid(), signal.SIGKILL)", "by signal 9")],
)
def test_what_was_said_before_the_end_is_heard_and_then_how_it_ended(run, start, end, shown):
    async def work() -> None:
        said = 'connection.sendall(encode_frame(StartRefused(start.config["model"])))'
        client = await start(f"{said}\n{end}", EngineConfig(model="m"))
        while psutil.pid_exists(client.process_id) and client._process.poll() is None:
            await asyncio.sleep(0.01)
        assert await client.receive() == StartRefused("m")
        with pytest.raises(EngineDeadError, match=f"^the engine process has ended {shown}$"):
            await client.receive()
        await client.close()

    run(work())


def test_bytes_that_are_no_message_are_told_as_the_engines_end(run, start):
    async def work() -> None:
        client = await start("connection.sendall(bytes([4, 0, 0, 0]) + b'oops'); read()")
        with pytest.raises(EngineDeadError, match="sent no message"):
            await client.receive()
        await client.close(at_once=True)
        assert not psutil.pid_exists(client.process_id)

    run(work())


def test_an_engine_that_takes_its_leave_is_waited_for(run, start):
    async def work() -> None:
        client = await start("assert isinstance(read(), Shutdown); time.sleep(0.2); sys.exit(7)")
        await client.close()
        assert client._process.returncode == 7

    run(work())


def test_an_engine_that_does_not_leave_is_killed_and_nobody_waits_for_it(run, start, monkeypatch):
    monkeypatch.setattr(socket_client, "EXIT_SECONDS", 0.1)

    async def work() -> None:
        client = await start("time.sleep(60)")
        ticks = asyncio.create_task(count_ticks())
        begin = time.monotonic()
        await client.close()
        assert time.monotonic() - begin < 5
        assert client._process.returncode == -9 and not psutil.pid_exists(client.process_id)
        ticks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticks

    async def count_ticks() -> None:
        """The loop must never be held up."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            assert time.monotonic() - last < 1
            last = time.monotonic()

    run(work())


def test_a_close_that_is_cancelled_leaves_no_process(run, start):
    async def work() -> None:
        client = await start("time.sleep(60)")
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await asyncio.to_thread(client._process.wait, 10)

    run(work())


def test_a_program_that_is_not_there_leaves_no_socket(run, start, monkeypatch):
    async def work() -> None:
        monkeypatch.setattr(socket_client, "_command", lambda number: ["/nowhere/at/all"])
        num_open = []
        for _ in range(3):  # uvloop opens a file of its own with the first socket
            with pytest.raises(OSError, match="/nowhere"):
                await SocketClient.start(EngineConfig())
            await asyncio.sleep(0.01)
            num_open.append(psutil.Process().num_fds())
        assert num_open[1] == num_open[2]

    run(work())
