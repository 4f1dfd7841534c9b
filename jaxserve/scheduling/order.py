"""SequenceOrder: gives sequences their places by a policy, and measures what it goes by."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from jaxserve.request import FinishReason, Sequence
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.cost_model import CostModel
from jaxserve.scheduling.policies import DecodeLoad, Policy, SequenceFacts
from jaxserve.scheduling.step_time_model import StepShape
from jaxserve.step import ScheduledRow, SchedulerOutput

_order_key = attrgetter("order_key")


def insert_in_order(sequences: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
    """Put a sequence where its key belongs; at either end that takes no search."""
    if not sequences or sequences[-1].order_key < sequence.order_key:
        sequences.append(sequence)
    elif sequence.order_key < sequences[0].order_key:
        sequences.insert(0, sequence)
    else:
        insort(sequences, sequence, key=_order_key)


class SequenceOrder:
    """The order of all sequences under one policy.

    The last number of a key counts the sequences, so no two keys are equal.

    Attributes:
      costs: what was learnt from steps and sequences; only where the policy goes by it.
    """

    def __init__(self, policy: Policy, config: SchedulerConfig, clock: Callable[[], float]):
        """Start without sequences.

        Args:
          policy: gives the keys.
          config: has the buckets of steps.
          clock: monotonic seconds; times the steps where the policy goes by that.
        """
        self.costs = CostModel()
        self._policy, self._config, self._clock = policy, config, clock
        self._num_placed = 0
        self._started: dict[SchedulerOutput, tuple[StepShape, float]] = {}
        self._last_end = -math.inf

    @property
    def is_by_arrival(self) -> bool:
        """Whether no sequence comes before one that was added earlier."""
        return self._policy.is_by_arrival

    def place(self, sequence: Sequence) -> None:
        """Set the keys of a new sequence, whose `max_num_tokens` is known."""
        request = sequence.request
        first_token_seconds = total_seconds = 0.0
        if self._policy.needs_estimates:
            num_prompt_tokens = sequence.num_prompt_tokens
            max_output_tokens = sequence.max_num_tokens - num_prompt_tokens
            first_token_seconds = self.costs.first_token_seconds(
                num_prompt_tokens, self._config.max_steps_in_flight
            )
            total_seconds = self.costs.sequence_seconds(num_prompt_tokens, max_output_tokens)
        facts = SequenceFacts(
            arrival_seconds=request.arrival_seconds,
            priority=request.priority,
            first_token_seconds=first_token_seconds,
            total_seconds=total_seconds,
            ttft_goal_seconds=request.ttft_goal_seconds,
        )
        number = self._num_placed
        self._num_placed += 1
        sequence.order_key = (*self._policy.key(facts), number)
        late = self._policy.late_key(facts)
        if late is not None:
            sequence.latest_start_seconds = late.latest_start_seconds
            sequence.late_order_key = (*late.key, number)

    def max_prompt_tokens(self, decode_rows: list[ScheduledRow]) -> int | None:
        """Limit the prompt tokens of a step beside these decode rows; None = no limit."""
        if not decode_rows or not self._policy.needs_estimates:
            return None
        load = DecodeLoad(
            num_rows=len(decode_rows),
            num_tokens=sum(row.num_scheduled_tokens for row in decode_rows),
            num_context_tokens=sum(row.start for row in decode_rows),
            tpot_goals_seconds=frozenset(
                row.sequence.request.tpot_goal_seconds for row in decode_rows
            ),
        )
        buckets = self._config.token_buckets
        return self._policy.max_prompt_tokens(load, self.costs.step_times, buckets)

    def start_step(self, output: SchedulerOutput) -> None:
        """Note when a step was scheduled."""
        if self._policy.needs_estimates:
            self._started[output] = (self._shape(output), self._clock())

    def end_step(self, output: SchedulerOutput) -> None:
        """Learn from a step whose results are there.

        Its time runs from its own start, or from the end of the step before it if that is later:
        until then the device was busy.
        """
        if self._policy.needs_estimates:
            shape, start_seconds = self._started.pop(output)
            start_seconds = max(start_seconds, self._last_end)
            self._last_end = self._clock()
            # Prompts bring tokens too, but beside them a decode row has one.
            takes_several = output.num_decode_rows == len(output.rows) < output.num_tokens
            num_steps = self._config.max_decode_row_tokens if takes_several else 1
            self.costs.observe_step(shape, self._last_end - start_seconds, num_steps)

    def drop_step(self, output: SchedulerOutput) -> None:
        """Forget a step that failed."""
        self._started.pop(output, None)

    def end_sequence(self, sequence: Sequence) -> None:
        """Learn from a sequence that ended by itself."""
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.costs.observe_output(sequence.num_output_tokens)

    def _shape(self, output: SchedulerOutput) -> StepShape:
        decode_rows = output.rows[: output.num_decode_rows]
        num_context_tokens = sum(row.start for row in decode_rows)
        num_prompt_tokens = 0
        if len(decode_rows) < len(output.rows):
            buckets = self._config.token_buckets
            num_padded_tokens = buckets[bisect_left(buckets, output.num_tokens)]
            num_decode_tokens = sum(row.num_scheduled_tokens for row in decode_rows)
            num_prompt_tokens = num_padded_tokens - num_decode_tokens
        return StepShape(num_prompt_tokens, len(decode_rows), num_context_tokens)
