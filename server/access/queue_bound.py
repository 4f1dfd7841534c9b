"""QueueBound: refuses requests while too many sequences or prompt tokens wait already."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.errors import QueueFullError
from jaxserve.processing.request_loop import Submission
from server.access.leaving_rate import LeavingRate
from server.config import ServerConfig

LEAST_QUEUED = 256
QUEUED_PER_RUNNING = 4
QUEUED_TOKENS_PER_TOKEN = 8


@dataclass(slots=True, eq=False)
class Place:
    """What one request takes in the queue; while it is prepared, one sequence of no tokens."""

    num_sequences: int = 1
    num_tokens: int = 0

    def take(self, submissions: Sequence[Submission]) -> None:
        """Count what is really sent to the engine."""
        requests = [request for request, _ in submissions]
        self.num_sequences = sum(request.sampling_params.n for request in requests)
        self.num_tokens = sum(
            request.sampling_params.n * len(request.prompt_token_ids) for request in requests
        )


class QueueBound:
    """Counts the unfinished requests of this server.

    The first `num_running` sequences are taken for those that do not wait. That is so under first
    come, first served; under other policies the waiting tokens are an estimate. A request that
    finds the queue below its bound is taken whole, so that none is too big for an idle server.

    Args:
      engine: whose requests they are.
      config: with the bounds.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine, self._config = engine, config
        self._places: dict[int, Place] = {}
        self._rate = LeavingRate(clock)

    @property
    def num_requests(self) -> int:
        """Unfinished requests, those included that are still prepared."""
        return len(self._places)

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """A place for a request until its end.

        An end without an exception counts for the time after which others shall ask again.

        Raises:
          QueueFullError: too much waits already.
        """
        self._check()
        place = Place()
        self._places[id(place)] = place
        try:
            yield place
            if place.num_tokens:
                self._rate.note_end(place.num_sequences, place.num_tokens)
        finally:
            del self._places[id(place)]

    def seconds_until_served(self) -> int:
        """Whole seconds until what waits now has ended, by estimate."""
        return self._rate.retry_seconds(*self._waiting())

    def _check(self) -> None:
        info = self._engine.info
        if info is None:
            return
        config = self._config
        max_sequences = config.max_num_queued_reqs
        if max_sequences is None:
            max_sequences = max(LEAST_QUEUED, QUEUED_PER_RUNNING * info.max_num_seqs)
        max_tokens = config.max_num_queued_tokens
        if max_tokens is None:
            max_tokens = QUEUED_TOKENS_PER_TOKEN * (max(info.num_pages) - 1) * info.page_size
        num_sequences, num_tokens = self._waiting()
        self._rate.watch(is_waiting=num_sequences > 0)
        if num_sequences >= max_sequences or num_tokens >= max_tokens:
            too_many = "reqs" if num_sequences >= max_sequences else "tokens"
            self._engine.observers.tell("rejected", f"max_num_queued_{too_many}")
            raise QueueFullError(
                f"the queue must have room; {num_sequences} sequences with {num_tokens} prompt "
                f"tokens wait, and {max_sequences} with {max_tokens} may: ask again later",
                retry_seconds=self._rate.retry_seconds(
                    max(0, num_sequences - max_sequences + 1), max(0, num_tokens - max_tokens + 1)
                ),
            )

    def _waiting(self) -> tuple[int, int]:
        """Sequences and prompt tokens behind those that run."""
        num_running = self._engine.stats.num_running
        num_sequences = num_tokens = 0
        for place in self._places.values():
            num_left = place.num_sequences
            if num_running:
                num_left = max(0, num_left - num_running)
                num_running = max(0, num_running - place.num_sequences)
            num_sequences += num_left
            num_tokens += place.num_tokens * num_left // place.num_sequences
        return num_sequences, num_tokens
