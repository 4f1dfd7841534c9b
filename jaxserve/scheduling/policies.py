"""Policies: who comes first, and how many prompt tokens a step may hold."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxserve.errors import EngineConfigError
from jaxserve.scheduling.step_time_model import StepShape, StepTimeModel

Key = tuple[float, ...]
"""Where a sequence stands: the smaller comes first, and of equal ones the one added first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFacts:
    """What a policy knows of a sequence when it is added.

    Attributes:
      arrival_seconds: when its request arrived, on a monotonic clock.
      priority: the client's; lower is sooner.
      first_token_seconds: estimated time from its slot to its first token.
      total_seconds: estimated device time of prompt and output.
      ttft_goal_seconds: wanted time from arrival to the first token; None = the policy's default.
    """

    arrival_seconds: float
    priority: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    ttft_goal_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """The decode rows of a step.

    Attributes:
      num_rows: how many.
      num_tokens: that they compute; more than one a row only where a step samples several.
      num_context_tokens: tokens that they see, together.
      tpot_goals_seconds: the different goals of their requests; None = the policy's default.
    """

    num_rows: int
    num_tokens: int
    num_context_tokens: int
    tpot_goals_seconds: frozenset[float | None]


@dataclass(frozen=True, slots=True)
class LateKey:
    """The key of a sequence that got no slot in time.

    Attributes:
      latest_start_seconds: after it this key takes the place of the first one.
      key: not smaller than the first one.
    """

    latest_start_seconds: float
    key: Key


class Policy(ABC):
    """The order of sequences: for slots, for a step's prompt tokens and for pages.

    Running and waiting sequences both stand in the order of their keys. The first that waits is
    admitted next, and prompt tokens of a step go by the same order, so a long prompt halts for a
    shorter wait of another. Who lacks pages takes them from the running sequence with the largest
    key; nobody is preempted for one that waits. A key is fixed when the sequence is added, but
    for one change at most (`late_key`).

    Attributes:
      needs_estimates: whether steps are measured and costs estimated for it.
      is_by_arrival: whether no sequence comes before one that was added earlier.
    """

    __slots__ = ()
    needs_estimates: ClassVar[bool] = False
    is_by_arrival: ClassVar[bool] = False

    @abstractmethod
    def key(self, facts: SequenceFacts) -> Key:
        """Give a sequence its place."""

    def late_key(self, facts: SequenceFacts) -> LateKey | None:
        """The place of a sequence that waited too long; None where waiting changes nothing."""
        del facts
        return None

    def max_prompt_tokens(
        self, load: DecodeLoad, step_times: StepTimeModel, token_buckets: tuple[int, ...]
    ) -> int | None:
        """Limit the prompt tokens of a step beside these decode rows; None = no limit.

        Args:
          load: at least one decode row.
          step_times: what steps take.
          token_buckets: padded token counts, ascending.
        """
        del load, step_times, token_buckets
        return None


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed(Policy):
    """Promise: no sequence is overtaken by one that was added later."""

    is_by_arrival: ClassVar[bool] = True

    def key(self, facts: SequenceFacts) -> Key:
        """All are equal, so the one added first comes first."""
        del facts
        return ()


@dataclass(frozen=True, slots=True)
class PriorityFirst(Policy):
    """Promise: no sequence is overtaken by one of a larger priority value, nor by a later equal.

    Lower values come sooner, as in vLLM. A sequence may wait for ever while smaller ones come.
    """

    def key(self, facts: SequenceFacts) -> Key:
        """Order by the client's value."""
        return (facts.priority,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestFirst(Policy):
    """Sequences that cost little come first; waiting makes up for cost.

    Promise: sequence A is overtaken by a later one only if that arrives less than
    `min(ageing * cost(A), max_wait_seconds)` after A, with the cost estimated when A was added.
    Then A waits only for those already ahead of it, so none waits for ever. Proof: B is ahead of
    A if `arrival(B) + wait(B) < arrival(A) + wait(A)`, and `wait(B)` is at least 0.

    Sequences whose wait reaches `max_wait_seconds` are served in the order of their arrival.

    Attributes:
      ageing: seconds of waiting that outweigh one second of estimated cost; 0 is first come,
        first served.
      max_wait_seconds: no cost weighs more.

    Raises:
      EngineConfigError: a value is negative.
    """

    ageing: float = 100.0
    max_wait_seconds: float = 30.0
    needs_estimates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the values."""
        _check_at_least("ageing", self.ageing, 0)
        _check_at_least("max_wait_seconds", self.max_wait_seconds, 0)

    def wait_seconds(self, facts: SequenceFacts) -> float:
        """How long after a sequence another may arrive and still overtake it."""
        return min(self.ageing * facts.total_seconds, self.max_wait_seconds)

    def key(self, facts: SequenceFacts) -> Key:
        """Order by arrival and what waiting must make up for."""
        return (facts.arrival_seconds + self.wait_seconds(facts),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceGoals(Policy):
    """Earliest deadline first, and steps short enough for those that decode.

    The deadline of a sequence is its arrival and its goal for the time to the first token (TTFT).
    Steps are cut so that those that decode get each token in the time of their goal (TPOT, the
    smallest of them counts), by what steps were measured to take.

    Promises:

    1. Of two sequences that can still meet their TTFT goals the one whose deadline is earlier
       comes first.
    2. One that gets no slot early enough for its prompt, by estimate, has lost its goal. It then
       stands as if its deadline were `late_wait_seconds` later: behind those whose
       goals can still be met, but overtaken only by sequences that arrive less than
       `ttft_goal + late_wait_seconds` after it. So none waits for ever.
    3. A step with decode rows holds no more prompt tokens than the smallest TPOT goal allows, as
       far as the model of step times is right; but always fills the smallest bucket that holds
       `min_prompt_tokens` beside the decode rows, if there are so many, so prompts always advance.

    When not all goals can be met, TPOT wins over TTFT: prompts wait while those that decode keep
    their pace. Only the floor of the third promise goes above TPOT. A goal says nothing about
    the time that a preempted sequence waits for its pages.

    Attributes:
      ttft_goal_seconds: of requests that name none.
      tpot_goal_seconds: of requests that name none.
      late_wait_seconds: see above.
      min_prompt_tokens: see above.
      headroom: share of the TPOT goal that steps leave free, in [0, 1), for what the model does
        not know.

    Raises:
      EngineConfigError: a value breaks its rule.
    """

    ttft_goal_seconds: float = 1.0
    tpot_goal_seconds: float = 0.05
    late_wait_seconds: float = 10.0
    min_prompt_tokens: int = 128
    headroom: float = 0.1
    needs_estimates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the values."""
        _check_at_least("ttft_goal_seconds", self.ttft_goal_seconds, 0)
        _check_at_least("tpot_goal_seconds", self.tpot_goal_seconds, 0)
        _check_at_least("late_wait_seconds", self.late_wait_seconds, 0)
        _check_at_least("min_prompt_tokens", self.min_prompt_tokens, 1)
        if not 0 <= self.headroom < 1:
            raise EngineConfigError(f"headroom must be in [0, 1); got {self.headroom}")

    def deadline_seconds(self, facts: SequenceFacts) -> float:
        """When the first token should be there."""
        goal = facts.ttft_goal_seconds
        return facts.arrival_seconds + (self.ttft_goal_seconds if goal is None else goal)

    def key(self, facts: SequenceFacts) -> Key:
        """Order by deadline."""
        return (self.deadline_seconds(facts),)

    def late_key(self, facts: SequenceFacts) -> LateKey:
        """Put one that lost its goal behind those that have not."""
        deadline = self.deadline_seconds(facts)
        return LateKey(deadline - facts.first_token_seconds, (deadline + self.late_wait_seconds,))

    def max_prompt_tokens(
        self, load: DecodeLoad, step_times: StepTimeModel, token_buckets: tuple[int, ...]
    ) -> int | None:
        """Fill the largest bucket whose step takes no longer than the TPOT goal, or the floor."""
        rooms = [bucket - load.num_tokens for bucket in token_buckets]
        rooms = [room for room in rooms if room >= self.min_prompt_tokens]
        if not rooms:
            return None
        if not step_times.has_prompt_steps:
            return rooms[0]
        default = self.tpot_goal_seconds
        goal = min(default if goal is None else goal for goal in load.tpot_goals_seconds)
        limit = (1 - self.headroom) * goal
        fits = [
            room
            for room in rooms
            if step_times.seconds(StepShape(room, load.num_rows, load.num_context_tokens)) <= limit
        ]
        return max(fits, default=rooms[0])


FIRST_COME_FIRST_SERVED = FirstComeFirstServed()

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest-first": ShortestFirst,
    "slo": ServiceGoals,
}
"""Every policy by the name that users give."""


def _check_at_least(name: str, value: float, lowest: float) -> None:
    if not value >= lowest:
        raise EngineConfigError(f"{name} must be at least {lowest}; got {value}")
