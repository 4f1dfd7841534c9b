"""StepRecovery: what becomes of the sequences and the device's arrays when a step fails."""

import logging
from collections import deque
from typing import Any

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.device_fault import FaultKind, fault_kind
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import ScheduledRow, SchedulerOutput, SequenceUpdate

logger = logging.getLogger(__name__)

StepsBehind = deque[tuple[SchedulerOutput, Any]]
"""Steps in flight that were started after the failed one, the oldest first."""


class StepRecovery:
    """Ends what must end after a failed step, and puts the rest back into the queue.

    A program that fails takes the arrays that were donated to it along, and so do programs that
    fail long after their dispatch: cache and state are then errors. Whether they are still there
    decides, not where the error was raised.

    | error | cache and state are there | they are lost |
    |---|---|---|
    | on the host | the sequences at fault end, or else all of the step | as on the device |
    | out of memory | the step is tried again in smaller ones | all sequences are computed again |
    | on the device | all unfinished sequences end | the same |

    Wherever arrays may be wrong they are allocated anew, zeros. A device that fails again before
    any step has come back is given up.

    Attributes:
      death_reason: why no step can run any more; None while they can.
    """

    def __init__(self, scheduler: Scheduler, builder: BatchBuilder):
        self._scheduler, self._builder = scheduler, builder
        self._was_reset = False
        self.death_reason: str | None = None

    def note_success(self) -> None:
        """A step has come back."""
        self._was_reset = False

    def recover(
        self, runner: ModelRunner, output: SchedulerOutput, error: Exception, behind: StepsBehind
    ) -> list[SequenceUpdate]:
        """Take back the oldest step in flight, which has failed.

        Args:
          runner: holds the arrays.
          output: the step.
          error: of building, dispatching or collecting it.
          behind: is emptied if they are taken back, too.
        """
        ids = [row.sequence.request.request_id for row in output.rows]
        logger.error("the step of requests %s failed", ids, exc_info=error)
        message = f"the step failed: {type(error).__name__}"
        kind, is_intact = fault_kind(error), runner.is_intact()
        moved = [step for step in (output, *(step for step, _ in behind)) if step.moves_pages]
        if runner.drop_moves() or moved:  # pages may not hold what they should, nor slots
            self._scheduler.reset_prefix_cache()
        if kind is FaultKind.OUT_OF_MEMORY:
            return self._run_smaller(runner, output, message, behind, is_intact=is_intact)
        if kind is FaultKind.HOST and is_intact:
            return self._end_at_fault(output, message, behind)
        return self._end_all(runner, message, behind)

    def _end_at_fault(
        self, output: SchedulerOutput, message: str, behind: StepsBehind
    ) -> list[SequenceUpdate]:
        """End the sequences whose rows cannot be built; all of the step if it is none of them."""
        guilty = [] if behind else [r.sequence for r in output.rows if not self._can_build(r)]
        if not guilty:
            return self._scheduler.fail_step(output, message)
        self._scheduler.retry_step(output)
        return self._scheduler.fail(message, guilty)

    def _can_build(self, row: ScheduledRow) -> bool:
        """Build a row as a step of its own."""
        alone = SchedulerOutput(
            rows=(row,), num_decode_rows=int(row.is_decode), num_tokens=row.num_scheduled_tokens
        )
        try:
            self._builder.build(alone)
        except Exception as error:
            name = row.sequence.request.request_id
            logger.error("request %s ends, since its row cannot be built: %s", name, error)
            return False
        return True

    def _run_smaller(
        self,
        runner: ModelRunner,
        output: SchedulerOutput,
        message: str,
        behind: StepsBehind,
        *,
        is_intact: bool,
    ) -> list[SequenceUpdate]:
        """Put all steps back and make the next ones smaller; the smallest ends its sequences."""
        scheduler = self._scheduler
        updates: list[SequenceUpdate] = []
        can_shrink = scheduler.lower_token_limit(output)
        while behind:
            scheduler.retry_step(behind.pop()[0])
        if can_shrink:
            scheduler.retry_step(output)
        else:
            updates += scheduler.fail_step(output, message)
        if not is_intact:
            scheduler.drop_cache()
            updates += self._reset(runner)
        return updates

    def _end_all(
        self, runner: ModelRunner, message: str, behind: StepsBehind
    ) -> list[SequenceUpdate]:
        updates = self._scheduler.fail_all(message)
        behind.clear()
        if self._was_reset:
            self.death_reason = f"the device failed twice in a row; {message}"
            return updates
        self._was_reset = True
        return updates + self._reset(runner)

    def _reset(self, runner: ModelRunner) -> list[SequenceUpdate]:
        """Allocate cache and state anew; where that fails, everything ends."""
        try:
            runner.reset()
        except Exception as error:
            logger.error("the device does not answer", exc_info=error)
            self.death_reason = f"the device does not answer: {type(error).__name__}"
            return self._scheduler.fail_all(self.death_reason)
        logger.warning("cache and state were allocated anew")
        return []
