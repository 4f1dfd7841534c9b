"""SchedulerFacts: what may be asked of a scheduler at any time."""

from jaxserve.scheduling.admission import max_sequence_tokens
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.roster import Roster


class SchedulerFacts:
    """Counts and shares, read from the books; changes nothing."""

    def __init__(self, config: SchedulerConfig, roster: Roster):
        self._config, self._roster = config, roster

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence waits, runs, or has ended but still holds its slot and pages."""
        roster = self._roster
        return bool(roster.running or roster.waiting or roster.leaving)

    @property
    def unfinished_request_ids(self) -> tuple[str, ...]:
        """Of the requests of which a sequence waits or runs."""
        return tuple(self._roster.unfinished)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._roster.waiting)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start; never falls."""
        return self._roster.num_preemptions

    @property
    def max_tokens_per_sequence(self) -> int:
        """Tokens, prompt included, that one sequence alone can have: the model's, or the pages'."""
        return max_sequence_tokens(
            self._roster.page_pools,
            max_model_len=self._config.max_model_len,
            max_row_tokens=self._config.max_row_tokens,
        )

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each cache group, the null page included."""
        return tuple(pool.num_usable + 1 for pool in self._roster.page_pools)

    @property
    def page_pools(self) -> tuple[PagePool, ...]:
        """The pool of each cache group."""
        return self._roster.page_pools

    @property
    def has_prefix_cache(self) -> bool:
        """Whether computed prefixes are remembered."""
        return self._config.enable_prefix_caching

    @property
    def lookahead_tokens(self) -> int | None:
        """With more waiting prompt tokens the next steps are the same, whoever comes later.

        None = they never are. A step that leaves prompt tokens over is the same, if the first come
        first and each token takes its place in a step; and no more fit the steps in flight. With a
        prefix cache or a threshold a step goes further down the queue.
        """
        config = self._config
        needs_all = (
            not self._roster.order.is_by_arrival
            or config.enable_prefix_caching
            or config.long_prefill_token_threshold
        )
        return None if needs_all else config.max_steps_in_flight * config.max_num_batched_tokens

    @property
    def num_window_pages_freed(self) -> int:
        """Pages that running sequences gave back, since the start; never falls."""
        return self._roster.num_window_pages_freed

    @property
    def num_prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache since the start; never falls."""
        return self._roster.prefixes.num_queries

    @property
    def num_prefix_hits(self) -> int:
        """How many of them were found; never falls."""
        return self._roster.prefixes.num_hits

    @property
    def num_host_prefix_hits(self) -> int:
        """How many of these were fetched from the host's memory; never falls."""
        return self._roster.prefixes.num_host_hits

    @property
    def num_copied_pages(self) -> int:
        """Pages that were copied for a sequence that shares their first tokens; never falls."""
        return self._roster.prefixes.copies.num_copied_pages

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that are held, in [0, 1]; of the fullest group. 0 when idle."""
        pools = self._roster.page_pools
        return max((pool.num_usable - pool.num_free) / pool.num_usable for pool in pools)

    @property
    def unused_slot_share(self) -> float:
        """Share of the token slots in held pages that hold no computed token, in [0, 1].

        A page that several sequences share counts once. Pages of a window group that lie partly
        before the window count as used.
        """
        roster = self._roster
        num_slots = num_unused = 0
        for group, pool in enumerate(roster.page_pools):
            num_slots += (pool.num_usable - pool.num_free) * pool.page_size
            for sequence in (*roster.running, *roster.leaving):
                end = len(sequence.page_tables[group]) * pool.page_size
                num_unused += max(0, end - sequence.num_computed_tokens)
        return num_unused / num_slots if num_slots else 0.0

    def page_tables(self) -> dict[tuple[str, int], tuple[tuple[int, ...], ...]]:
        """Copy who holds which pages now.

        Returns:
          For each sequence that holds a slot, by request id and index, its page table in each
          cache group; 0 where a page was given back. Of two with one name the running one.
        """
        roster = self._roster
        return {
            (sequence.request.request_id, sequence.index): tuple(map(tuple, sequence.page_tables))
            for sequence in (*roster.leaving, *roster.running)
        }
