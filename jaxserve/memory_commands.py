"""MemoryCommands: what an engine process was asked to do with its memory and has not answered."""

import asyncio
from collections import deque

from jaxserve.distributed.messages import MemoryChanged, MemoryCommand, Sleep
from jaxserve.errors import EngineNotReadyError, InvalidRequestError


class MemoryCommands:
    """Waiters in the order of their commands, which is that of the answers; on one event loop."""

    def __init__(self):
        """Begin with none."""
        self._open: deque[tuple[MemoryCommand, asyncio.Future[None]]] = deque()

    @property
    def will_sleep(self) -> bool:
        """Whether the engine was asked to sleep and has not answered."""
        return any(isinstance(command, Sleep) for command, _ in self._open)

    def expect(self, command: MemoryCommand) -> asyncio.Future[None]:
        """Wait for the answer to a command that is about to be sent.

        The future raises InvalidRequestError where the engine's state forbids it, and
        EngineNotReadyError where it did not work out.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.append((command, done))
        return done

    def answer(self, message: MemoryChanged) -> None:
        """Tell the oldest waiter."""
        _, done = self._open.popleft()
        if done.done():  # its caller has gone
            return
        if message.error is None:
            done.set_result(None)
        else:
            kind = InvalidRequestError if message.is_refusal else EngineNotReadyError
            done.set_exception(kind(message.error))

    def give_up(self) -> None:
        """Wake all waiters: there will be no answer, and they must see why for themselves."""
        while self._open:
            _, done = self._open.popleft()
            if not done.done():
                done.set_result(None)
