"""Engine: add, abort, step. The page to read first."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import msgspec

from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.model_runner import ModelRunner, StepHandle
from jaxserve.execution.poison import PagePoisoner
from jaxserve.execution.sleeping import Sleeper
from jaxserve.request import FinishReason, Request, Sequence
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.sleep_options import WAKE_TAGS
from jaxserve.step import SchedulerOutput, SequenceUpdate, StepResult
from jaxserve.step_recovery import StepRecovery


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
        poisoner: PagePoisoner | None = None,
    ):
        self.scheduler, self.runner, self._builder = scheduler, runner, builder
        self._max_steps_in_flight = max_steps_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle | Exception]] = deque()
        self._recovery = StepRecovery(scheduler, builder)
        self._sleeper = Sleeper()
        self._poisoner = poisoner
        self._random = Random(seed)
        self._updates: list[SequenceUpdate] = []
        self.times = StepTimes()

    def add(self, request: Request) -> None:
        """Queue a request's `n` sequences.

        Raises:
          RequestTooLongError: it can never fit the pool of pages.
          EngineNotReadyError: the engine sleeps, or a released KV cache finds no memory.
          EngineDeadError: the engine is dead.
        """
        self.make_ready()
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

    def make_ready(self) -> None:
        """Take a released KV cache back, so that requests and pages can come.

        Raises:
          EngineNotReadyError: the engine sleeps, or a released KV cache finds no memory.
          EngineDeadError: the engine is dead.
        """
        self._check_not_dead()
        self._sleeper.check_awake()
        self._sleeper.restore_cache(self.runner)

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
        """Keep the device busy, and return what the oldest step in flight brought.

        A step that fails raises nothing: its sequences end with an error or run again, see
        `StepRecovery`.

        Raises:
          EngineDeadError: the engine is dead, and has told how each sequence ended.
          EngineNotReadyError: it sleeps, and has told how those ended that it does not keep.
        """
        if not self._updates:
            self._check_not_dead()
            self._sleeper.check_awake()
        self._updates += self.scheduler.expire()
        while self._may_start:
            output = self._schedule()
            if output is None:
                break
            self._start(output)
        if self._in_flight:
            self._finish(*self._in_flight.popleft())
        updates, self._updates = self._updates, []
        return updates

    def sleep(self, level: int = 1, *, keeps_requests: bool = False) -> None:
        """Wait for the steps in flight, and free the device's memory; see `Sleeper.sleep`.

        Args:
          level: 1 or 2.
          keeps_requests: unfinished requests stay, and are computed again after the wake-up.
            Otherwise they end with ABORT; the next step tells.

        Raises:
          EngineNotReadyError: the host has no memory for the weights; the engine is awake.
          EngineDeadError: the engine is dead.
        """
        self._check_not_dead()
        for request_id in () if keeps_requests else self.scheduler.unfinished_request_ids:
            self.abort(request_id)
        while self._in_flight:
            self._finish(*self._in_flight.popleft())
        self._check_not_dead()
        self._forget_cache()
        self._sleeper.sleep(self.runner, level)

    def wake_up(self, tags: Iterable[str] = WAKE_TAGS) -> None:
        """Bring arrays back to the device; see `Sleeper.wake_up`, also for what it raises."""
        self._sleeper.wake_up(self.runner, tags)

    def release_cache(self) -> None:
        """Free the memory of the KV cache; the next request or wake-up takes it again.

        Raises:
          InvalidRequestError: a request is unfinished.
          EngineDeadError: the engine is dead.
        """
        self._check_not_dead()
        if self.scheduler.has_unfinished and not self.sleep_level:
            num_unfinished = len(self.scheduler.unfinished_request_ids)
            raise InvalidRequestError(
                f"release_kv_cache_memory must be called while no request is unfinished; "
                f"got {num_unfinished}"
            )
        self._forget_cache()
        self._sleeper.drop_cache(self.runner)

    def _forget_cache(self) -> None:
        """Nothing may refer to the cache's content any more."""
        self.runner.drop_moves()
        self.scheduler.drop_cache()
        if self._poisoner is not None:
            self._poisoner.forget()

    @property
    def sleep_level(self) -> int:
        """1 or 2 while the engine sleeps, until all is back on the device; else 0."""
        return self._sleeper.level

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would bring something; what a sleeping engine keeps waits."""
        if self.sleep_level:
            return bool(self._updates)
        return bool(self._in_flight or self._updates or self.scheduler.has_unfinished)

    @property
    def death_reason(self) -> str | None:
        """Why no step can run any more; None while they can."""
        return self._recovery.death_reason

    @property
    def is_dead(self) -> bool:
        """Whether the device was given up; then nothing is unfinished and nothing is taken."""
        return self.death_reason is not None

    def _check_not_dead(self) -> None:
        if self.is_dead:
            raise EngineDeadError(f"the engine is dead: {self.death_reason}")

    @property
    def _may_start(self) -> bool:
        """Nothing is started behind a step whose start has failed, before that is dealt with."""
        if not self._in_flight:
            return not self.sleep_level
        is_failed = isinstance(self._in_flight[-1][1], Exception)
        return not is_failed and len(self._in_flight) < self._max_steps_in_flight

    def _schedule(self) -> SchedulerOutput | None:
        start = time.perf_counter()
        output = self.scheduler.schedule()
        self.times.schedule += time.perf_counter() - start
        return output

    def _start(self, output: SchedulerOutput) -> None:
        """Build and dispatch a step; where that raises, the step fails when its turn has come."""
        times, start = self.times, time.perf_counter()
        try:
            batch = self._builder.build(output)
            built = time.perf_counter()
            if self._poisoner is not None:
                self._poisoner.poison_before(output, self.runner)
            handle = self.runner.dispatch(batch)
        except Exception as error:
            self._in_flight.append((output, error))
            return
        self._in_flight.append((output, handle))
        times.build += built - start
        times.dispatch += time.perf_counter() - built
        times.num_steps += 1
        times.num_tokens += batch.num_tokens
        times.num_padded_tokens += batch.bucket.num_tokens * batch.bucket.num_steps

    def _finish(self, output: SchedulerOutput, handle: StepHandle | Exception) -> None:
        """Collect and commit the oldest step, or recover from its failure."""
        times, start = self.times, time.perf_counter()
        try:
            if isinstance(handle, Exception):
                raise handle
            result = self.runner.collect(handle)
        except Exception as error:
            self._fail(output, error)
            return
        collected = time.perf_counter()
        self._updates += self._commit(output, result)
        times.collect += collected - start
        times.commit += time.perf_counter() - collected

    def _commit(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        self._recovery.note_success()
        if self._poisoner is None or result.is_finite.all():
            return self.scheduler.commit(output, result)
        rows = zip(output.rows, result.is_finite, strict=False)  # the result may be padded
        found = {
            row.sequence.request.request_id: self._poisoner.explain(row, self.runner)
            for row, is_finite in rows
            if not is_finite
        }
        return [
            msgspec.structs.replace(update, error=f"{update.error}; {found[update.request_id]}")
            if update.error and found.get(update.request_id)
            else update
            for update in self.scheduler.commit(output, result)
        ]

    def _fail(self, output: SchedulerOutput, error: Exception) -> None:
        """Take back the oldest step in flight, which has failed."""
        if self._poisoner is not None:
            self._poisoner.forget()
        self._updates += self._recovery.recover(self.runner, output, error, self._in_flight)
