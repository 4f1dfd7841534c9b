"""LeavingRate: how fast requests end while others wait, which tells when there is room again."""

import math
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30
MAX_RETRY_SECONDS = 60
"""Longer waits are taken for a mistake by OpenAI's client, which then chooses its own."""


class LeavingRate:
    """Sequences and prompt tokens of the requests that ended lately.

    What leaves a server that is not full tells what its clients ask, not what it can do. So only
    the time counts in which something waited, back to the last moment when nothing did, and
    `WINDOW_SECONDS` at most.
    """

    def __init__(self, clock: Callable[[], float]):
        """Start with nothing known.

        Args:
          clock: monotonic seconds.
        """
        self._clock = clock
        self._waits_since: float | None = None
        self._ends: deque[tuple[int, int, int]] = deque()

    def watch(self, *, is_waiting: bool) -> None:
        """Hear whether something waits; to be told before each arrival."""
        if not is_waiting:
            self._waits_since = None
            self._ends.clear()
        elif self._waits_since is None:
            self._waits_since = self._clock()

    def note_end(self, num_sequences: int, num_tokens: int) -> None:
        """Count a request that ended: its sequences, and the tokens of their prompts."""
        if self._waits_since is None:
            return
        second = int(self._clock())
        self._forget_before(second - WINDOW_SECONDS)
        if self._ends and self._ends[-1][0] == second:  # one entry a second, however many end
            _, sequences, tokens = self._ends.pop()
            num_sequences, num_tokens = num_sequences + sequences, num_tokens + tokens
        self._ends.append((second, num_sequences, num_tokens))

    def retry_seconds(self, num_sequences: int, num_tokens: int) -> int:
        """When to ask again, in [1, `MAX_RETRY_SECONDS`].

        Args:
          num_sequences: that must leave before.
          num_tokens: of prompts that must leave before.

        Returns:
          Whole seconds until both have left at the rate of late; as long again as was waited so
          far where nothing has left yet.
        """
        if self._waits_since is None:
            return 1
        now = self._clock()
        self._forget_before(int(now) - WINDOW_SECONDS)
        seconds = min(now - self._waits_since, WINDOW_SECONDS)
        if self._ends:
            sequences_left = sum(end[1] for end in self._ends)
            tokens_left = sum(end[2] for end in self._ends)
            seconds *= max(num_sequences / sequences_left, num_tokens / max(1, tokens_left))
        return min(max(1, math.ceil(seconds)), MAX_RETRY_SECONDS)

    def _forget_before(self, second: int) -> None:
        while self._ends and self._ends[0][0] < second:
            self._ends.popleft()
