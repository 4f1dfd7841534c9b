"""TokenLimit: how many tokens a step may hold now; less for a while after memory ran out."""

from jaxserve.scheduling.config import SchedulerConfig

STEPS_BEFORE_GROWTH = 16
"""Steps that succeed under a lowered limit before it is doubled."""
MAX_SMALLEST_FAILURES = 3
"""Failures of the smallest steps after which the next one is not tried again.

Not one: memory that something else has taken for a moment comes back. Not without end: the prompts
that are computed again between two failures are no progress.
"""


class TokenLimit:
    """The token budget of a step, lowered by failures and raised again by successes.

    The smallest limit fills the smallest bucket: a step of fewer tokens takes the same program,
    and as much memory.

    Attributes:
      now: tokens of the next step.
    """

    def __init__(self, config: SchedulerConfig):
        """Start at the full budget."""
        self._most = self.now = config.max_num_batched_tokens
        self._least = min(config.token_buckets[0], config.row_buckets[0])
        self._num_successes = self._num_smallest_failures = 0

    def lower(self, num_tokens: int) -> bool:
        """Make steps half as large as one that found no memory.

        Args:
          num_tokens: of that step.

        Returns:
          False when it makes no sense to try again: steps were as small as can be, and have failed
          too often since the limit last grew.
        """
        if self.now <= self._least:
            self._num_smallest_failures += 1
            return self._num_smallest_failures < MAX_SMALLEST_FAILURES
        self.now = max(self._least, min(self.now, num_tokens) // 2)
        self._num_successes = 0
        return True

    def note_success(self) -> None:
        """Count a step that came back; enough of them double a lowered limit."""
        if self.now == self._most:
            return
        self._num_successes += 1
        if self._num_successes == STEPS_BEFORE_GROWTH:
            self.now = min(2 * self.now, self._most)
            self._num_successes = self._num_smallest_failures = 0
