"""The process that owns the device: messages in, one frame a step out. Run by SocketClient.

The engine works in the main thread. One thread reads the socket and one writes to it, so a step
never waits for the other process, unless that has stopped reading altogether.
"""

import contextlib
import functools
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from jaxserve.config import EngineConfig
from jaxserve.distributed.engine_facts import StatsTaker, engine_info
from jaxserve.distributed.messages import (
    HEADER_BYTES,
    AbortRequest,
    AddRequest,
    BadFrameError,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    MemoryChanged,
    MemoryCommand,
    PrefixCacheReset,
    ReleaseCache,
    RequestRefused,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    StartEngine,
    StartProgressed,
    StartRefused,
    StepNews,
    ToEngine,
    WakeUp,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from jaxserve.engine_client import InProcessClient
from jaxserve.errors import (
    EngineConfigError,
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    JaxServeError,
)
from jaxserve.log_writer import LINE_START, TIME_FORMAT, LogWriter
from jaxserve.step import StopAbort
from jaxserve.watchdog import Watchdog
from models.errors import ModelLoadError

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.engine_builder import BuiltEngine

logger = logging.getLogger(__name__)

MAX_UNSENT_FRAMES = 4096
"""Steps ahead of a reader that does not read; then the engine waits for it."""
LAST_WORDS_SECONDS = 2.0
"""So long an engine that cannot go on tries to tell why."""


class EngineSocket:
    """The engine's end of the socket: queues in front of two threads.

    Args:
      connection: a connected socket.
      when_gone: called, in the thread that saw it, when the other end is gone.

    Attributes:
      inbox: messages that have come.
      num_bad_frames: frames that were dropped, since they held no message.
    """

    def __init__(self, connection: socket.socket, when_gone: Callable[[], object]):
        self._connection, self._when_gone = connection, when_gone
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: queue.Queue[bytes | None] = queue.Queue(MAX_UNSENT_FRAMES)
        self.num_bad_frames = 0
        self._writer = threading.Thread(target=self._write, name="socket writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="socket reader", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._writer.start()
        self._reader.start()

    def send(self, message: FromEngine) -> None:
        """Queue a message."""
        self._outbox.put(encode_frame(message))

    def flush(self) -> None:
        """Wait until all that was queued has been handed to the socket."""
        if self._writer.is_alive():
            self._outbox.put(None)
        self._writer.join()

    def send_last(self, message: FromEngine) -> None:
        """Send a message and all before it, unless the other end is slow to read; then none."""
        with contextlib.suppress(queue.Full):
            self._outbox.put(encode_frame(message), timeout=LAST_WORDS_SECONDS)
            self._outbox.put(None, timeout=LAST_WORDS_SECONDS)
            self._writer.join(LAST_WORDS_SECONDS)

    def join(self) -> None:
        """Wait for both threads; for those who closed the other end themselves."""
        self.flush()
        self._reader.join()

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                self._read_frames(stream)
        except (OSError, BadFrameError) as error:
            logger.error("the socket cannot be read: %s", error)
        self._when_gone()

    def _read_frames(self, stream: BinaryIO) -> None:
        while len(header := stream.read(HEADER_BYTES)) == HEADER_BYTES:
            body = stream.read(frame_length(header))
            try:
                self.inbox.put(decode_to_engine(body))
            except BadFrameError as error:
                self.num_bad_frames += 1
                logger.error("%s", error)

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                self._when_gone()
                return


class EngineLoop:
    """Steps an engine while it has work, and takes messages between the steps.

    Args:
      engine: ready to step.
      connection: to the other process.
      watchdog: sees steps that hang; None = no one does.

    Attributes:
      is_leaving: whether Shutdown has come.
    """

    def __init__(
        self, engine: "Engine", connection: EngineSocket, watchdog: Watchdog | None = None
    ):
        self._engine, self._connection = engine, connection
        self._watch = watchdog or contextlib.nullcontext()
        self._taker = StatsTaker(engine)
        self._commands: deque[MemoryCommand] = deque()
        self.is_leaving = False

    def run(self) -> None:
        """Work until Shutdown comes.

        Raises:
          EngineDeadError: the device was given up; the other process knows.
        """
        while not self.is_leaving:
            self.turn()

    def turn(self) -> None:
        """Take the messages that have come, and run one step if there is work."""
        self._take_messages()
        while self._commands and not self.is_leaving and self._may_obey(self._commands[0]):
            self._connection.send(self._obey(self._commands.popleft()))
        self._step()

    def _step(self) -> None:
        """Run one step if there is work, and tell of it."""
        if self._engine.has_unfinished and not self.is_leaving:
            with self._watch:
                updates = self._engine.step()
            self._taker.take_in(updates)
            self._connection.send(StepNews(updates, self._stats()))
            if self._engine.death_reason is not None:
                self._connection.send_last(EngineFailed(self._engine.death_reason))
                raise EngineDeadError(self._engine.death_reason)

    def _stats(self) -> EngineStats:
        return self._taker.stats(num_bad_frames=self._connection.num_bad_frames)

    def _may_obey(self, command: MemoryCommand) -> bool:
        is_waiting = isinstance(command, Sleep) and command.mode == "wait"
        return not (is_waiting and self._engine.has_unfinished)

    def _obey(self, command: MemoryCommand) -> MemoryChanged:
        """Free or take memory; what ends by it is told before the answer."""
        try:
            match command:
                case Sleep():
                    self._engine.sleep(command.level, keeps_requests=command.mode != "abort")
                    self._step()
                case WakeUp():
                    self._engine.wake_up(command.tags)
                case ReleaseCache():
                    self._engine.release_cache()
        except ModelLoadError as error:  # names files of this machine
            logger.error("the weights could not be loaded again: %s", error)
            message = "the weights could not be loaded again; see the server's log"
            return MemoryChanged(self._stats(), message)
        except JaxServeError as error:
            is_refusal = isinstance(error, InvalidRequestError)
            return MemoryChanged(self._stats(), str(error), is_refusal)
        return MemoryChanged(self._stats())

    def _take_messages(self) -> None:
        """All that have come; waits for one when there is nothing else to do."""
        inbox = self._connection.inbox
        if not self._engine.has_unfinished and not self._commands:
            self._handle(inbox.get())
        while not inbox.empty():
            self._handle(inbox.get())

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest():
                self._engine.abort(message.request_id)
            case StopAbort():
                InProcessClient(self._engine).stop(message)
            case ResetPrefixCache():
                self._engine.scheduler.reset_prefix_cache()
                self._connection.send(PrefixCacheReset())
            case Sleep() | WakeUp() | ReleaseCache():
                self._commands.append(message)
            case Shutdown():
                self.is_leaving = True
            case StartEngine():
                logger.error("StartEngine came to an engine that has started; it is ignored")

    def _add(self, message: AddRequest) -> None:
        """Queue a request; one that cannot be taken ends for its client, and nothing else does."""
        try:
            self._engine.add(message.request())
        except (JaxServeError, ValueError) as error:
            is_not_ready = isinstance(error, EngineNotReadyError)
            self._connection.send(RequestRefused(message.request_id, str(error), is_not_ready))


def serve(connection: EngineSocket) -> int:
    """Build the engine that the first message asks for, and work until the end.

    Returns:
      The exit status: 2 for a model or setting that cannot be served.
    """
    message = connection.inbox.get()
    if not isinstance(message, StartEngine):
        raise BadFrameError(f"the first message must be StartEngine; got {type(message).__name__}")
    try:
        built = _build(message, connection)
    except (ModelLoadError, EngineConfigError) as error:
        connection.send(StartRefused(str(error)))
        connection.flush()
        return 2
    connection.send(EngineReady(engine_info(built, message.config["block_size"])))
    watchdog = None
    if built.step_timeout is not None:
        watchdog = Watchdog(built.step_timeout, functools.partial(_leave_hung, connection))
    EngineLoop(built.engine, connection, watchdog).run()
    _keep_programs()
    return 0


def _keep_programs() -> None:
    """Write what is not kept yet, as far as the other process waits for this one's end."""
    from jaxserve.execution.program_store import write_all

    write_all()


def _leave_hung(connection: EngineSocket, message: str) -> None:
    """End the process from the watchdog's thread: the main thread waits for the device."""
    connection.send_last(EngineFailed(message))
    logging.shutdown()
    os._exit(1)


def _build(message: StartEngine, connection: EngineSocket) -> "BuiltEngine":
    from jaxserve.engine_builder import build_engine

    def tell(stage: str, done: int, total: int) -> None:
        connection.send(StartProgressed(stage, done, total))

    return build_engine(EngineConfig(**message.config), tell)


def main(file_descriptor: int, log_level: int) -> int:
    """Run an engine for the process at the other end of a connected socket.

    Signals of the terminal and of a supervisor's group are for that process, which drains first.

    Args:
      file_descriptor: of the socket.
      log_level: of that process.

    Returns:
      The exit status: 0 after Shutdown, 1 after a failure, 2 for what cannot be served.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    writer = LogWriter(sys.stderr)
    logging.basicConfig(
        level=log_level,
        format=f"{LINE_START} engine: %(message)s",
        datefmt=TIME_FORMAT,
        handlers=[writer],
    )
    logging.getLogger("jax").setLevel(max(log_level, logging.WARNING))
    # Without the other process nobody can want a result, and the device's memory must come free.
    connection = EngineSocket(socket.socket(fileno=file_descriptor), when_gone=lambda: os._exit(1))
    connection.start()
    try:
        return serve(connection)
    except Exception:
        logger.exception("the engine has failed")
        return 1


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    # Programs may run or compile: an interpreter that ends meanwhile is aborted, or waits for them.
    logging.shutdown()
    os._exit(status)
