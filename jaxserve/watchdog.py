"""Watchdog: sees that a step does not come back, and tells where its threads stand."""

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

TICKS_PER_LIMIT = 20
MAX_TICK_SECONDS = 1.0


class Watchdog:
    """A thread that counts its own ticks while a step runs; no JAX.

    It counts ticks, not seconds: a process or a machine that was suspended is not a step that
    hangs. It sees nothing while the interpreter itself is held, which XLA does not do while it
    waits for a device.

    Use it as a context around each step.
    """

    def __init__(self, limit_seconds: float, when_hung: Callable[[str], object]):
        """Start to watch; nothing runs yet.

        Args:
          limit_seconds: of a step; more than 0.
          when_hung: called in the watchdog's thread, once for each step that takes longer, with
            a sentence.
        """
        self._limit_seconds, self._when_hung = limit_seconds, when_hung
        self._tick_seconds = min(limit_seconds / TICKS_PER_LIMIT, MAX_TICK_SECONDS)
        self._num_entered = self._num_left = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_stopped.set()

    def __enter__(self) -> None:
        self._num_entered += 1

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._num_left += 1

    def _watch(self) -> None:
        step, num_ticks = 0, 0
        limit = round(self._limit_seconds / self._tick_seconds)
        while not self._is_stopped.wait(self._tick_seconds):
            current = self._num_entered
            if current == self._num_left or current != step:
                step, num_ticks = current, 0
                continue
            num_ticks += 1
            if num_ticks == limit:
                self._tell()

    def _tell(self) -> None:
        message = f"a step has not come back for {self._limit_seconds:g} s"
        logger.error("%s; the threads stand at:\n%s", message, format_stacks())
        self._when_hung(message)


def format_stacks() -> str:
    """The stack of every Python thread of this process but the caller's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
