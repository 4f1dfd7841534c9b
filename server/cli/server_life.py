"""From the start of a server to its end: ready, drained, or dead with its engine."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import Protocol

from jaxserve.async_llm_engine import AsyncLLMEngine, EngineState
from server.cli.failures import CommandError
from server.cli.http_server import HttpServer
from server.cli.listening import Listener

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
LAST_ANSWERS_SECONDS = 2.0
"""How long answers may take to tell clients of an engine's death."""
LAST_BODIES_SECONDS = 1.0
"""How long a drain waits for bodies that have begun to come."""
SECOND_SIGNAL_SECONDS = 0.5
"""Between the second signal and the end."""


class DrainState(Protocol):
    """The application's state: it refuses new requests while it is draining."""

    is_draining: bool


class ServerLife:
    """Runs one engine and one HTTP server, and ends both together.

    The first SIGTERM or SIGINT drains: new requests are refused, running ones finish. The second
    one ends the process. A dead engine ends it too, so that a supervisor starts it again.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        http: HttpServer,
        application: DrainState,
        drain_seconds: float,
    ):
        self._engine, self._http, self._application = engine, http, application
        self._drain_seconds = drain_seconds
        self._signal: signal.Signals | None = None
        self._second_signal: signal.Signals | None = None

    async def run(self, listener: Listener) -> int:
        """Start, serve, and end.

        Returns:
          The exit status: 0 after a drain; 1 when the engine has died; 130 after Ctrl-C while it
          was starting; 128 and the signal after a second one.

        Raises:
          CommandError: the engine has refused its model or settings, or died at its start.
        """
        self._listener = listener
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal, number)
        await self._engine.start()
        serving = asyncio.create_task(self._http.serve([listener.socket]), name="http")
        logger.info("listening at %s; the engine is starting", listener.address)
        try:
            return await self._live(serving)
        finally:
            self._http.stop()
            await asyncio.gather(self._engine.close(), serving)

    async def _live(self, serving: "asyncio.Task[None]") -> int:
        if not await self._become_ready():
            return 130 if self._signal is signal.SIGINT else 0
        logger.info("ready at %s", self._listener.address)
        while self._signal is None and not self._is_dead and not serving.done():
            await asyncio.sleep(POLL_SECONDS)
        if self._signal is not None:
            await self._drain()
        if self._second_signal is not None:
            await self._let_clients_know()
            return 128 + self._second_signal
        if self._is_dead:
            return await self._end_with_engine()
        return 0

    @property
    def _is_dead(self) -> bool:
        return self._engine.state is EngineState.DEAD

    async def _become_ready(self) -> bool:
        """Wait for the engine; False when a signal came first."""
        shown = None
        while self._engine.state is EngineState.STARTING and self._signal is None:
            stage, done, total = self._engine.progress
            if stage != shown:
                shown = stage
                logger.info("the engine is at: %s", stage)
            await asyncio.sleep(POLL_SECONDS)
        if self._is_dead:
            await self._let_clients_know()
            status = 2 if self._engine.is_refused else 1
            raise CommandError(str(self._engine.error), status)
        if self._signal is not None:
            self._engine.kill()
            return False
        return True

    async def _drain(self) -> None:
        """Refuse new requests, and give running ones their time."""
        self._application.is_draining = True
        logger.info(
            "draining: %d requests have %g s to finish; a second signal ends them",
            self._engine.num_unfinished_requests,
            self._drain_seconds,
        )
        start = time.monotonic()
        end = start + self._drain_seconds
        last_coming = min(end, start + LAST_BODIES_SECONDS)
        while not self._is_dead and time.monotonic() < end:
            is_coming = self._http.num_coming > 0 and time.monotonic() < last_coming
            if not self._is_busy and not is_coming:
                break
            await asyncio.sleep(POLL_SECONDS)
        if self._is_dead:
            return
        if self._is_busy:
            num = self._engine.num_unfinished_requests
            logger.warning("%d requests are ended, since their time is over", num)
        else:
            logger.info("drained: all requests are finished")

    @property
    def _is_busy(self) -> bool:
        return self._http.is_answering or self._engine.num_unfinished_requests > 0

    async def _end_with_engine(self) -> int:
        logger.error("%s; this process ends too", self._engine.error)
        await self._let_clients_know()
        return 1

    async def _let_clients_know(self) -> None:
        """Let answers under way, and one more look at /health, tell that the engine is dead."""
        end = time.monotonic() + LAST_ANSWERS_SECONDS
        await asyncio.sleep(2 * POLL_SECONDS)
        while self._http.is_answering and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)

    def _take_signal(self, number: signal.Signals) -> None:
        if self._signal is None:
            self._signal = signal.Signals(number)
            return
        logger.warning("a second signal: requests are cut off")
        self._second_signal = signal.Signals(number)
        self._engine.kill()
        self._application.is_draining = True
        asyncio.get_running_loop().call_later(SECOND_SIGNAL_SECONDS, self._exit, number)

    def _exit(self, number: int) -> None:
        """End now; nothing is waited for, not even the loop's own end."""
        with contextlib.suppress(OSError):
            self._listener.close()
        os._exit(128 + number)
