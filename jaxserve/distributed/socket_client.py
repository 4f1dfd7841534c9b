"""SocketClient: the HTTP process's end of the socket to an engine process, which it starts.

The two ends are a socket pair: nothing in the file system, and no one else can connect. Either
process sees the other's death as the end of the stream.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import subprocess
import sys
import time
from typing import Self

from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    BadFrameError,
    FromEngine,
    Shutdown,
    StartEngine,
    ToEngine,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from jaxserve.errors import EngineDeadError

EXIT_SECONDS = 5.0
"""An engine that was asked to leave, and does not within this time, is killed."""
STATUS_SECONDS = 1.0
"""A process whose socket has closed ends so soon, or its status is not told."""
POLL_SECONDS = 0.01


class SocketClient:
    """Messages to and from one engine process; used on one event loop only."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, config: EngineConfig) -> Self:
        """Start an engine process; it loads and compiles, and tells of it in messages.

        Raises:
          OSError: there is no process to be had.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_FRAME_BYTES)
            try:
                writer.write(encode_frame(StartEngine(dataclasses.asdict(config))))
                process = subprocess.Popen(
                    _command(theirs.fileno()), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer)

    @property
    def process_id(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message; to a dead engine nothing is sent, and `receive` tells."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def receive(self) -> FromEngine:
        """The next message.

        Raises:
          EngineDeadError: there will be none: the process has ended, or sent what is none.
        """
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode_from_engine(await self._reader.readexactly(frame_length(header)))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineDeadError(
                f"the engine process has ended{await self._how_it_ended()}"
            ) from error
        except BadFrameError as error:
            raise EngineDeadError(f"the engine process sent no message: {error}") from error

    async def close(self, *, at_once: bool = False) -> None:
        """Let the engine leave, or make it, and see that it has left."""
        try:
            if not at_once:
                self.send(Shutdown())
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(self._writer.drain(), EXIT_SECONDS)
                await self._wait(EXIT_SECONDS)
        finally:
            self.kill()
            self._writer.close()
        await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        """End the process at once; `close` takes it off the process table."""
        self._process.kill()

    async def _wait(self, seconds: float) -> int | None:
        """The exit status, or None if the process has not ended by then."""
        end = time.monotonic() + seconds
        while (status := self._process.poll()) is None and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        return status

    async def _how_it_ended(self) -> str:
        """The exit status; the stream's end comes a moment before it."""
        status = await self._wait(STATUS_SECONDS)
        if status is None:
            return ""
        return f" by signal {-status}" if status < 0 else f" with status {status}"


def _command(file_descriptor: int) -> list[str]:
    level = logging.getLogger("jaxserve").getEffectiveLevel()
    words = [str(file_descriptor), str(level)]
    return [sys.executable, "-P", "-m", "jaxserve.distributed.engine_process", *words]
