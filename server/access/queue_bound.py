"""QueueBound: refuses requests while too many sequences or prompt tokens wait already."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.errors import QueueFullError
from jaxserve.processing.request_loop import Submission
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

    The engine runs them in the order in which they came, so the first `num_running` sequences are
    those that do not wait. A request that finds the queue below its bound is taken whole, so that
    none is too big for an idle server.
    """

    def __init__(self, engine: AsyncLLMEngine, config: ServerConfig):
        self._engine, self._config = engine, config
        self._places: dict[int, Place] = {}

    @property
    def num_requests(self) -> int:
        """Unfinished requests, those included that are still prepared."""
        return len(self._places)

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """A place for a request until its end.

        Raises:
          QueueFullError: too much waits already.
        """
        self._check()
        place = Place()
        self._places[id(place)] = place
        try:
            yield place
        finally:
            del self._places[id(place)]

    def _check(self) -> None:
        info = self._engine.info
        if info is None or not self._places:
            return
        config, num_running = self._config, self._engine.stats.num_running
        max_sequences = config.max_num_queued_reqs
        if max_sequences is None:
            max_sequences = max(LEAST_QUEUED, QUEUED_PER_RUNNING * info.max_num_seqs)
        max_tokens = config.max_num_queued_tokens
        if max_tokens is None:
            max_tokens = QUEUED_TOKENS_PER_TOKEN * (max(info.num_pages) - 1) * info.page_size
        num_sequences, num_tokens = self._waiting(num_running)
        if num_sequences >= max_sequences or num_tokens >= max_tokens:
            too_many = "reqs" if num_sequences >= max_sequences else "tokens"
            self._engine.observers.tell("rejected", f"max_num_queued_{too_many}")
            raise QueueFullError(
                f"the queue must have room; {num_sequences} sequences with {num_tokens} prompt "
                f"tokens wait, and {max_sequences} with {max_tokens} may: ask again later"
            )

    def _waiting(self, num_running: int) -> tuple[int, int]:
        """Sequences and prompt tokens behind those that run."""
        num_sequences = num_tokens = 0
        for place in self._places.values():
            num_left = place.num_sequences
            if num_running:
                num_left = max(0, num_left - num_running)
                num_running = max(0, num_running - place.num_sequences)
            num_sequences += num_left
            num_tokens += place.num_tokens * num_left // place.num_sequences
        return num_sequences, num_tokens
