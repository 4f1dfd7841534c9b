"""Who hears what happens in an engine, for metrics."""

import logging
from typing import Any, Protocol

from jaxserve.distributed.messages import EngineStats
from jaxserve.outputs import RequestOutput
from jaxserve.request import Request

logger = logging.getLogger(__name__)


class EngineObserver(Protocol):
    """Hears what happens in an engine, for metrics. What it raises is logged, and no more."""

    def added(self, request: Request) -> None:
        """A request was sent to the engine."""
        ...

    def stepped(self, stats: EngineStats) -> None:
        """A step is done."""
        ...

    def gave(self, request: Request, output: RequestOutput) -> None:
        """A request has an output; the last one is `finished`."""
        ...

    def aborted(self, request: Request) -> None:
        """A request's client has gone before its end."""
        ...

    def rejected(self, reason: str) -> None:
        """A request was refused before the engine had it, since too much waits."""
        ...


class Observers(list[EngineObserver]):
    """The observers of one engine; none of them can hurt it."""

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the method of that name of each."""
        for observer in self:
            try:
                getattr(observer, event)(*arguments)
            except Exception:
                logger.exception("an observer failed in %s", event)
