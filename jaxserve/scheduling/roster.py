"""Roster: which sequences wait, run and leave, and the slots and pages that they own."""

import math
from collections import deque
from collections.abc import Callable, Iterable

from jaxserve.request import FinishReason, Sequence, SequenceStatus
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.order import SequenceOrder, insert_in_order
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.prefix_index import PrefixHit, PrefixIndex
from jaxserve.scheduling.slot_pool import SlotPool

NewPages = tuple[tuple[tuple[int, int], ...], ...]
"""For each cache group, `(index in the page table, page id)`."""


class Roster:
    """Moves sequences between their states, and slots and pages with them.

        WAITING --admit--> RUNNING --preempt_last--> LEAVING --settle--> WAITING
           |                  |                           |
           +-------end--------+----------end--------------+--settle--> FINISHED

    Steps in flight write the pages of a LEAVING sequence, so its slot and pages come free in
    `settle` alone, when no step holds it any more, whatever the reason that it leaves for.

    Both `running` and `waiting` stand in the order of their keys (`policies.py`). The victim of a
    preemption is the last that runs; it waits at once, while it is still LEAVING. Only the first
    that waits is admitted, so no one is admitted past a smaller key.

    Pages of a RUNNING sequence come free in `free_dead_pages` alone.
    """

    def __init__(
        self,
        page_pools: tuple[PagePool, ...],
        config: SchedulerConfig,
        clock: Callable[[], float],
        order: SequenceOrder,
    ):
        """Start without sequences.

        Args:
          page_pools: one pool for each cache group.
          config: gives the number of slots, and how long rows are.
          clock: monotonic seconds.
          order: gives sequences their keys.
        """
        self.order = order
        self.page_pools = page_pools
        self.slot_pool = SlotPool(config.max_num_seqs)
        self.max_row_tokens = config.max_row_tokens
        self.max_uncertain_tokens = config.max_uncertain_tokens
        self.window_groups = tuple(
            group for group, pool in enumerate(page_pools) if pool.sliding_window is not None
        )
        self.num_window_pages_freed = 0
        self.prefixes = PrefixIndex(page_pools, is_enabled=config.enable_prefix_caching)
        self._clock = clock
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.leaving: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self.num_held_steps = 0  # in a row, that left out the decode rows
        self.no_pages: NewPages = ((),) * len(page_pools)
        self.page_step = math.gcd(*(pool.page_size for pool in page_pools))
        self.unfinished: dict[str, dict[int, Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, whose `max_num_tokens` is known, among the waiting ones.

        Raises:
          ValueError: an unfinished sequence has the same request id and index.
        """
        siblings = self.unfinished.setdefault(sequence.request.request_id, {})
        if sequence.index in siblings:
            name = (sequence.request.request_id, sequence.index)
            raise ValueError(f"request_id and index must be those of no unfinished one; got {name}")
        siblings[sequence.index] = sequence
        sequence.page_tables = [[] for _ in self.page_pools]
        sequence.num_freed_pages = [0] * len(self.page_pools)
        self.prefixes.prepare(sequence)
        self.order.place(sequence)
        insert_in_order(self.waiting, sequence)

    def find(self, request_id: str, index: int | None) -> list[Sequence]:
        """Find the unfinished sequences of a request, or the one of that index."""
        siblings = self.unfinished.get(request_id, {})
        if index is None:
            return list(siblings.values())
        return [siblings[index]] if index in siblings else []

    def admit(self, hit: PrefixHit) -> Sequence:
        """Give the first waiting sequence a slot, and the pages that are computed already.

        The caller has seen that a slot is free, and that the pages of the hit may be taken.
        """
        sequence = self.waiting.popleft()
        self.prefixes.admit(sequence, hit)
        sequence.state_slot = self.slot_pool.allocate()
        sequence.num_prefill_tokens = len(sequence.token_ids)
        sequence.status = SequenceStatus.RUNNING
        if sequence.scheduled_seconds is None:
            sequence.scheduled_seconds = self._clock()
            sequence.latest_start_seconds = math.inf
        insert_in_order(self.running, sequence)
        return sequence

    def put_back_late(self) -> None:
        """Give late sequences their later keys, until the first that waits is not late.

        Each of them moves once, and only before it first gets a slot.
        """
        if not self.waiting or self.waiting[0].latest_start_seconds == math.inf:
            return
        now = self._clock()
        while self.waiting[0].latest_start_seconds < now:
            sequence = self.waiting.popleft()
            sequence.latest_start_seconds = math.inf
            sequence.order_key = sequence.late_order_key
            insert_in_order(self.waiting, sequence)

    def preempt_last(self) -> None:
        """Make the running sequence with the largest key wait.

        It keeps its tokens; their keys and values are computed again after its next admission.
        """
        victim = self.running.pop()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        insert_in_order(self.waiting, victim)
        self._leave(victim)

    def end(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End an unfinished sequence, in whatever state it is."""
        siblings = self.unfinished[sequence.request.request_id]
        del siblings[sequence.index]
        if not siblings:
            del self.unfinished[sequence.request.request_id]
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        self.order.end_sequence(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.status is SequenceStatus.WAITING:
            sequence.status = SequenceStatus.FINISHED
        else:
            self._leave(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Take slot and pages back from a LEAVING sequence if no step in flight holds it."""
        if sequence.num_steps_in_flight:
            return
        for group, pool in enumerate(self.page_pools):
            table = sequence.page_tables[group]
            pool.free(reversed(table[sequence.num_freed_pages[group] :]))
            table.clear()
            sequence.num_freed_pages[group] = sequence.num_cached_pages[group] = 0
        assert sequence.state_slot is not None
        self.slot_pool.free(sequence.state_slot)
        sequence.state_slot = None
        sequence.num_computed_tokens = 0
        del self.leaving[sequence]
        is_ended = sequence.finish_reason is not None
        sequence.status = SequenceStatus.FINISHED if is_ended else SequenceStatus.WAITING

    def free_dead_pages(self, sequence: Sequence) -> None:
        """Give back the pages that lie before the window of every token still to be computed.

        The caller is about to choose a row of the sequence for the next step. On the device the
        row starts at `num_computed_tokens`, or by `max_uncertain_tokens` earlier, so neither
        that step nor a later one reads these pages for this sequence. Steps in flight may still
        read them, or even write them, while another row gets them in this very step. That is
        safe, since each step takes the cache that the one before it returned: the device starts
        to write for the new owner when it is done with all earlier steps.
        """
        next_token = sequence.num_computed_tokens - self.max_uncertain_tokens
        for group in self.window_groups:
            pool, num_freed = self.page_pools[group], sequence.num_freed_pages[group]
            num_dead = pool.num_dead_pages(next_token)
            if num_dead <= num_freed:
                continue
            table = sequence.page_tables[group]
            pool.free(reversed(table[num_freed:num_dead]))
            table[num_freed:num_dead] = [0] * (num_dead - num_freed)
            sequence.num_freed_pages[group] = num_dead
            self.num_window_pages_freed += num_dead - num_freed

    def count_reserved_pages(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Count, for each group, the pages to keep free so that it can compute so many tokens.

        In a window group fewer than it will get in all, since it gives pages back on the way.
        """
        lengths = [len(table) for table in sequence.page_tables]
        return self._count_reserved(lengths, sequence.num_freed_pages, num_tokens)

    def count_admission_pages(self, hit: PrefixHit, num_tokens: int) -> list[int]:
        """The same of a waiting sequence, and the free pages that its hit takes."""
        lengths = [len(table) + bool(hit.sources) for table in hit.page_tables]
        missing = self._count_reserved(lengths, hit.num_dead_pages, num_tokens)
        return [sum(counts) for counts in zip(missing, hit.num_taken_pages, strict=True)]

    def _count_reserved(
        self, lengths: Iterable[int], num_freed: Iterable[int], num_tokens: int
    ) -> list[int]:
        counts = []
        for pool, length, freed in zip(self.page_pools, lengths, num_freed, strict=True):
            missing = max(0, pool.num_pages_for(num_tokens) - length)
            most = pool.max_held_pages(num_tokens, self.max_row_tokens)
            counts.append(min(missing, max(0, most - (length - freed))))
        return counts

    def count_missing_pages(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Count, for each group, the pages that the sequence lacks to hold so many tokens."""
        return [
            max(0, pool.num_pages_for(num_tokens) - len(table))
            for pool, table in zip(self.page_pools, sequence.page_tables, strict=True)
        ]

    def give_pages(self, sequence: Sequence, num_missing: list[int]) -> NewPages | None:
        """Extend the page tables of a sequence: in all groups, or in none and return None."""
        if any(n > p.num_free for n, p in zip(num_missing, self.page_pools, strict=True)):
            return None
        new_pages = []
        for pool, table, count in zip(
            self.page_pools, sequence.page_tables, num_missing, strict=True
        ):
            pages = pool.allocate(count)
            assert pages is not None
            new_pages.append(tuple(enumerate(pages, len(table))))
            table.extend(pages)
        return tuple(new_pages)

    def take_back_pages(self, sequence: Sequence, num_tokens: int, new_pages: NewPages) -> NewPages:
        """Shorten the page tables to what so many tokens need; return the new pages that stay."""
        kept = []
        for pool, table, pages in zip(
            self.page_pools, sequence.page_tables, new_pages, strict=True
        ):
            num_needed = pool.num_pages_for(num_tokens)
            pool.free(reversed(table[num_needed:]))
            del table[num_needed:]
            kept.append(tuple(page for page in pages if page[0] < num_needed))
        return tuple(kept)

    def will_free(self, num_missing: list[int]) -> bool:
        """Tell whether the pages will be there once all LEAVING sequences are gone."""
        return all(
            count <= pool.num_free + sum(_num_held(leaver, group) for leaver in self.leaving)
            for group, (pool, count) in enumerate(zip(self.page_pools, num_missing, strict=True))
        )

    def _leave(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.LEAVING
        self.prefixes.leave(sequence)
        self.leaving[sequence] = None
        self.settle(sequence)


def _num_held(sequence: Sequence, group: int) -> int:
    return len(sequence.page_tables[group]) - sequence.num_freed_pages[group]
