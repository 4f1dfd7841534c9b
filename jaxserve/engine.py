"""Engine: add, abort, step. The page to read first."""

import logging
import time
from collections import deque
from dataclasses import dataclass
from random import Random

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.model_runner import ModelRunner, StepHandle
from jaxserve.request import FinishReason, Request, Sequence
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SchedulerOutput, SequenceUpdate

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepTimes:
    """Host seconds and tokens of all steps so far.

    Attributes:
      schedule: deciding what runs.
      build: packing it.
      dispatch: upload and start of the programs.
      collect: waiting for and reading results; the device works meanwhile.
      commit: taking the results in.
      num_steps: dispatched.
      num_tokens: real tokens of these steps.
      num_padded_tokens: tokens of their buckets.
    """

    schedule: float = 0.0
    build: float = 0.0
    dispatch: float = 0.0
    collect: float = 0.0
    commit: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0


class Engine:
    """The loop around one model: requests in, updates of sequences out.

    Not safe to use from two threads at once.

    Attributes:
      scheduler: decides what runs.
      runner: holds the device's arrays.
      times: where the host's time went.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        *,
        max_steps_in_flight: int,
        seed: int = 0,
    ):
        self.scheduler, self.runner, self._builder = scheduler, runner, builder
        self._max_steps_in_flight = max_steps_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._random = Random(seed)
        self._updates: list[SequenceUpdate] = []
        self.times = StepTimes()

    def add(self, request: Request) -> None:
        """Queue a request's `n` sequences.

        Raises:
          RequestTooLongError: it can never fit the pool of pages.
        """
        seed = request.sampling_params.seed
        first_seed = self._random.getrandbits(63) if seed is None else seed
        for index in range(request.sampling_params.n):
            self.scheduler.add(
                Sequence(
                    request=request,
                    index=index,
                    seed=first_seed + index,
                    token_ids=list(request.prompt_token_ids),
                )
            )

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        *,
        finish_reason: FinishReason = FinishReason.ABORT,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """End a request or one of its sequences; see `Scheduler.abort`. The next step tells."""
        self._updates += self.scheduler.abort(
            request_id,
            index,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_output_tokens=num_output_tokens,
        )

    def step(self) -> list[SequenceUpdate]:
        """Keep the device busy, and return what the oldest step in flight brought."""
        self._updates += self.scheduler.expire()
        while len(self._in_flight) < self._max_steps_in_flight:
            output = self._schedule()
            if output is None:
                break
            self._start(output)
        if self._in_flight:
            self._finish(*self._in_flight.popleft())
        updates, self._updates = self._updates, []
        return updates

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would bring something."""
        return bool(self._in_flight or self._updates or self.scheduler.has_unfinished)

    def _schedule(self) -> SchedulerOutput | None:
        start = time.perf_counter()
        output = self.scheduler.schedule()
        self.times.schedule += time.perf_counter() - start
        return output

    def _start(self, output: SchedulerOutput) -> None:
        """Build and dispatch a step; one that raises ends its own sequences.

        Where the device itself fails, cache and state are lost with the donated arrays: later
        steps then fail in the same way, until nothing is left, and no request waits for ever.
        """
        times, start = self.times, time.perf_counter()
        try:
            batch = self._builder.build(output)
            built = time.perf_counter()
            handle = self.runner.dispatch(batch)
        except Exception as error:
            self._fail(output, error)
            return
        self._in_flight.append((output, handle))
        times.build += built - start
        times.dispatch += time.perf_counter() - built
        times.num_steps += 1
        times.num_tokens += batch.num_tokens
        times.num_padded_tokens += batch.bucket.num_tokens

    def _finish(self, output: SchedulerOutput, handle: StepHandle) -> None:
        """Collect and commit a step."""
        times, start = self.times, time.perf_counter()
        try:
            result = self.runner.collect(handle)
        except Exception as error:
            self._fail(output, error)
            return
        collected = time.perf_counter()
        self._updates += self.scheduler.commit(output, result)
        times.collect += collected - start
        times.commit += time.perf_counter() - collected

    def _fail(self, output: SchedulerOutput, error: Exception) -> None:
        ids = [row.sequence.request.request_id for row in output.rows]
        logger.exception("the step of requests %s failed", ids, exc_info=error)
        message = f"the step failed: {type(error).__name__}"
        self._updates += self.scheduler.fail_step(output, message)
