"""Deadlines: which unfinished sequences have waited or run past their time."""

import heapq
import itertools

from jaxserve.request import Sequence

_Entry = tuple[float, int, Sequence, bool]


class Deadlines:
    """The times by which sequences must have ended, or at least been scheduled.

    A sequence may finish before; it is then dropped when its time comes.
    """

    def __init__(self, max_queue_seconds: float | None):
        """Start empty.

        Args:
          max_queue_seconds: a sequence must first be scheduled within so many seconds of its
            arrival; None = it may wait for ever.
        """
        self._max_queue_seconds = max_queue_seconds
        self._entries: list[_Entry] = []
        self._count = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Watch a new sequence, if it has a deadline."""
        request = sequence.request
        if request.timeout_seconds is not None:
            self._push(request.arrival_seconds + request.timeout_seconds, sequence, False)
        if self._max_queue_seconds is not None:
            self._push(request.arrival_seconds + self._max_queue_seconds, sequence, True)

    def pop_late(self, now: float) -> list[Sequence]:
        """Take out the unfinished sequences that are late, the longest overdue first."""
        late: dict[Sequence, None] = {}
        while self._entries and self._entries[0][0] <= now:
            _, _, sequence, is_of_queue = heapq.heappop(self._entries)
            was_in_time = is_of_queue and sequence.scheduled_seconds is not None
            if sequence.finish_reason is None and not was_in_time:
                late[sequence] = None
        return list(late)

    def _push(self, when: float, sequence: Sequence, is_of_queue: bool) -> None:
        heapq.heappush(self._entries, (when, next(self._count), sequence, is_of_queue))
