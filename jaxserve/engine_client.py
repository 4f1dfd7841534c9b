"""EngineClient: how RequestLoop talks to an engine; to one in another process see SocketClient."""

import contextlib
from typing import Protocol

from jaxserve.request import FinishReason, Request
from jaxserve.step import SequenceUpdate, StopAbort
from jaxserve.watchdog import Watchdog


class SteppingEngine(Protocol):
    """What an in-process client needs of an engine."""

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would bring something."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        *,
        finish_reason: FinishReason = FinishReason.ABORT,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """End a request or one of its sequences."""
        ...

    def step(self) -> list[SequenceUpdate]:
        """Advance, and return news."""
        ...


class EngineClient(Protocol):
    """Requests down, updates of sequences up."""

    @property
    def has_unfinished(self) -> bool:
        """Whether updates are still to come."""
        ...

    def add(self, request: Request) -> None:
        """Send a request.

        Raises:
          RequestTooLongError: it can never fit the pool of pages.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request whose client does not wait for it any more."""
        ...

    def stop(self, stop: StopAbort) -> None:
        """End a sequence whose text reached a stop string."""
        ...

    def updates(self) -> list[SequenceUpdate]:
        """The news of one step; may be empty."""
        ...


class InProcessClient:
    """An EngineClient that drives an engine in the caller's own thread: notebooks and scripts.

    Args:
      engine: ready to step.
      watchdog: sees steps that hang; None = no one does.
    """

    def __init__(self, engine: SteppingEngine, watchdog: Watchdog | None = None):
        self._engine = engine
        self._watch = watchdog or contextlib.nullcontext()

    @property
    def has_unfinished(self) -> bool:
        """Whether updates are still to come."""
        return self._engine.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._engine.add(request)

    def abort(self, request_id: str) -> None:
        """End a request."""
        self._engine.abort(request_id)

    def stop(self, stop: StopAbort) -> None:
        """End a sequence whose text reached a stop string."""
        self._engine.abort(
            stop.request_id,
            stop.index,
            finish_reason=FinishReason.STOP,
            stop_reason=stop.stop,
            num_output_tokens=stop.num_output_tokens,
        )

    def updates(self) -> list[SequenceUpdate]:
        """Run one step."""
        with self._watch:
            return self._engine.step()
