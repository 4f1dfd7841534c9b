"""PrefixIndex: finds computed prefixes in the page pools, and remembers new ones."""

import math
from collections import Counter
from dataclasses import dataclass

from jaxserve.request import Sequence
from jaxserve.scheduling.copy_on_write import CopyOnWrite
from jaxserve.scheduling.page_digests import NameMemory, PageDigests, root_digest
from jaxserve.scheduling.page_pool import ON_HOST, PagePool
from jaxserve.step import PageMove


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What of a sequence's tokens is computed already.

    Attributes:
      num_tokens: leading tokens whose keys and values are in pages of every group.
      page_tables: for each group, the full ones of these pages; 0 where the window has passed,
        `ON_HOST` where the page must first be fetched from the host's memory.
      num_dead_pages: for each group, how many zeros stand first.
      num_taken_pages: for each group, how many free pages an admission takes: cached ones that no
        sequence holds, and pages for what is fetched or copied.
      is_promised: a running sequence is about to compute the next page, too.
      sources: for each group, the page behind the full ones, which must be copied; or empty.
    """

    num_tokens: int
    page_tables: tuple[list[int], ...]
    num_dead_pages: tuple[int, ...]
    num_taken_pages: tuple[int, ...]
    is_promised: bool
    sources: tuple[int, ...] = ()


class PrefixIndex:
    """Prefix caching over all cache groups.

    A page is remembered when the step that filled it is committed and all its tokens are known, so
    no other sequence ever reads what is not computed. A sequence that is admitted promises the
    full pages of its prompt; one that needs the same page waits for it, and does not compute it a
    second time. It waits for a running sequence only: one that leaves takes its promises back.
    Who has waited so for all full pages of an equal prompt waits for the rest of it, too.

    Attributes:
      copies: of pages that hold some of a sequence's next tokens.
      num_queries: tokens of the sequences that were looked up at their first admission.
      num_hits: how many of them were found.
      num_host_hits: how many of these in the host's memory.
    """

    def __init__(self, page_pools: tuple[PagePool, ...], *, is_enabled: bool):
        """Start without promises.

        Args:
          page_pools: of the groups.
          is_enabled: otherwise nothing is ever remembered.
        """
        self._pools, self._is_enabled = page_pools, is_enabled
        self._step = math.lcm(*(pool.page_size for pool in page_pools))
        whole = [group for group, pool in enumerate(page_pools) if pool.sliding_window is None]
        self._whole_groups = tuple(whole)
        self._promised: Counter[bytes] = Counter()
        self._no_pages = (0,) * len(page_pools)
        self.copies = CopyOnWrite(page_pools, is_enabled=is_enabled)
        self._memory = NameMemory()
        self.num_queries = 0
        self.num_hits = self.num_host_hits = 0
        self._fetches: list[PageMove] = []

    def prepare(self, sequence: Sequence) -> None:
        """Get a new sequence ready to be looked up."""
        sequence.num_cached_pages = [0] * len(self._pools)
        if not self._is_enabled:
            return
        root = root_digest(sequence.request.cache_salt)
        by_size = {
            size: PageDigests(root, sequence.token_ids, size, self._memory)
            for size in {pool.page_size for pool in self._pools}
        }
        sequence.page_digests = [by_size[pool.page_size] for pool in self._pools]

    def find(self, sequence: Sequence, *, may_copy: bool = True) -> PrefixHit:
        """Look up a waiting sequence; its last known token is always left to compute.

        Args:
          sequence: waits.
          may_copy: otherwise full pages alone are looked for.
        """
        if not self._is_enabled or sequence.request.sampling_params.skip_reading_prefix_cache:
            return PrefixHit(
                0, tuple([] for _ in self._pools), self._no_pages, self._no_pages, False
            )
        most = num_tokens = (len(sequence.token_ids) - 1) // self._step * self._step
        found: dict[int, list[int]] = {}
        for group in self._whole_groups:
            pool = self._pools[group]
            names = sequence.page_digests[group].up_to(num_tokens // pool.page_size)
            found[group] = pool.find_cached(names[: num_tokens // pool.page_size])
            num_tokens = len(found[group]) * pool.page_size // self._step * self._step
        find_copy = self.copies.find if may_copy else _find_no_copy
        num_copied, sources = find_copy(sequence, num_tokens)
        while num_tokens and not self._have_windows(sequence, num_tokens, num_tokens + num_copied):
            num_tokens -= self._step
            num_copied, sources = find_copy(sequence, num_tokens)
        tables, dead, taken = [], [], []
        for group, pool in enumerate(self._pools):
            first, end = pool.num_dead_pages(num_tokens + num_copied), num_tokens // pool.page_size
            if group in found:
                pages = found[group][:end]
            else:
                pages = pool.find_cached(sequence.page_digests[group].up_to(end)[first:end])
            tables.append([0] * first + pages)
            dead.append(first)
            num_found = pages.count(ON_HOST) + pool.cache.count_idle(pages)
            taken.append(num_found + self.copies.count_taken(group, sources))
        if num_tokens < most:
            is_promised = self._is_promised(sequence, num_tokens)
        else:
            num_left = len(sequence.token_ids) - 1 - num_tokens
            is_promised = num_copied < num_left and self._is_tail_promised(sequence)
        return PrefixHit(
            num_tokens + num_copied, tuple(tables), tuple(dead), tuple(taken), is_promised, sources
        )

    def admit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Give a sequence the pages of its hit, and promise the full pages that it will compute."""
        for group, pool in enumerate(self._pools):
            table = list(hit.page_tables[group])
            pool.take_cached(page for page in table if page > 0)
            if hit.sources:
                self.copies.hold(group, hit.sources[group])
            self._fetch(sequence, group, table)
            sequence.page_tables[group] = table
            sequence.num_freed_pages[group] = hit.num_dead_pages[group]
            sequence.num_cached_pages[group] = len(table)
            if hit.sources:
                table.append(self.copies.copy(group, hit.sources[group]))
        sequence.num_computed_tokens = hit.num_tokens
        if sequence.scheduled_seconds is None:
            sequence.num_cached_tokens = hit.num_tokens
            self.num_queries += len(sequence.token_ids)
            self.num_hits += hit.num_tokens
        if self._is_enabled and self._whole_groups:
            group = self._whole_groups[0]
            first = sequence.num_cached_pages[group]
            end = len(sequence.token_ids) // self._pools[group].page_size
            sequence.num_promised_pages = end
            self._promised.update(self._digests(sequence, group, first, end))
            if (len(sequence.token_ids) - 1) // self._pools[group].page_size > first:
                self._promise_tail(sequence)

    def remember(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Remember the full pages of a sequence.

        Args:
          sequence: holds its pages.
          num_computed_tokens: leading tokens whose keys and values committed steps have written.
        """
        if not self._is_enabled:
            return
        num_tokens = min(num_computed_tokens, len(sequence.token_ids))
        for group, pool in enumerate(self._pools):
            first, end = sequence.num_cached_pages[group], num_tokens // pool.page_size
            if end <= first:
                continue
            if self._whole_groups and group == self._whole_groups[0]:
                self._keep_promises(sequence, group, end)
            names = sequence.page_digests[group].up_to(end)
            for index in range(first, end):
                page = sequence.page_tables[group][index]
                if page:
                    pool.cache.add(page, names[index])
            sequence.num_cached_pages[group] = end

    def finish_prompt(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """All of a prompt is computed: others may have the page that it does not fill, too.

        Args:
          sequence: holds its pages.
          num_computed_tokens: see `remember`.
        """
        self.copies.remember(sequence, min(num_computed_tokens, len(sequence.token_ids)))
        self._strike_tail(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence computes no further: its last page may be copied, its promises end.

        It holds its pages. All its known tokens but the last are computed if one of them was
        sampled since its admission.
        """
        if len(sequence.token_ids) > sequence.num_prefill_tokens:
            self.copies.remember(sequence, len(sequence.token_ids) - 1)
        self._strike_tail(sequence)
        if sequence.num_promised_pages:
            self._keep_promises(sequence, self._whole_groups[0], sequence.num_promised_pages)
            sequence.num_promised_pages = 0

    def take_moves(self) -> tuple[tuple[PageMove, ...], tuple[PageMove, ...]]:
        """The offloads and fetches that must run before the step that is being built."""
        offloads = [
            PageMove(group=group, page=page, host_slot=slot)
            for group, pool in enumerate(self._pools)
            for page, slot in pool.take_evicted()
        ]
        fetches, self._fetches = self._fetches, []
        if fetches:
            for pool in self._pools:
                pool.host.unpin_all()
        return tuple(offloads), tuple(fetches)

    def _fetch(self, sequence: Sequence, group: int, table: list[int]) -> None:
        """Put pages in place of those on the host; they are cached as soon as they are fetched."""
        indices = [index for index, page in enumerate(table) if page == ON_HOST]
        if not indices:
            return
        pool, found = self._pools[group], []
        names = sequence.page_digests[group].up_to(len(table))
        for index in indices:  # before new pages are taken, which may drop what is on the host
            slot = pool.host.find(names[index])
            assert slot is not None
            pool.host.pin(names[index])
            found.append((index, slot))
        pages = pool.allocate(len(indices))
        assert pages is not None
        for page, (index, slot) in zip(pages, found, strict=True):
            table[index] = page
            pool.cache.add(page, names[index])
            self._fetches.append(PageMove(group=group, page=page, host_slot=slot))
        if self._whole_groups and group == self._whole_groups[0]:
            self.num_host_hits += len(indices) * pool.page_size

    def forget(self) -> None:
        """Forget all content; sequences that run keep their pages."""
        for pool in self._pools:
            pool.forget_cached()

    def _keep_promises(self, sequence: Sequence, group: int, end: int) -> None:
        """Strike the promises of pages up to `end`, which are computed or never will be."""
        end = min(end, sequence.num_promised_pages)
        for digest in self._digests(sequence, group, sequence.num_cached_pages[group], end):
            self._strike(digest)

    def _promise_tail(self, sequence: Sequence) -> None:
        sequence.promised_tail = self.copies.name_tail(sequence)
        if sequence.promised_tail:
            self._promised[sequence.promised_tail] += 1

    def _strike_tail(self, sequence: Sequence) -> None:
        if sequence.promised_tail:
            self._strike(sequence.promised_tail)
            sequence.promised_tail = b""

    def _strike(self, promise: bytes) -> None:
        self._promised[promise] -= 1
        if not self._promised[promise]:
            del self._promised[promise]

    def _is_tail_promised(self, sequence: Sequence) -> bool:
        return bool(self._promised) and self.copies.name_tail(sequence) in self._promised

    def _is_promised(self, sequence: Sequence, num_tokens: int) -> bool:
        if not self._promised or not self._whole_groups:
            return False
        group = self._whole_groups[0]
        page = num_tokens // self._pools[group].page_size
        return sequence.page_digests[group].up_to(page + 1)[page][0] in self._promised

    def _digests(self, sequence: Sequence, group: int, first: int, end: int) -> list[bytes]:
        names = sequence.page_digests[group].up_to(end)
        return [digest for digest, _ in names[first:end]]

    def _have_windows(self, sequence: Sequence, num_tokens: int, next_token: int) -> bool:
        """Whether all groups with a window have the full pages that it shows at the next token."""
        for group, pool in enumerate(self._pools):
            if group not in self._whole_groups:
                first, end = pool.num_dead_pages(next_token), num_tokens // pool.page_size
                names = sequence.page_digests[group].up_to(end)[first:end]
                if len(pool.find_cached(names)) < end - first:
                    return False
        return True


def _find_no_copy(sequence: Sequence, num_tokens: int) -> tuple[int, tuple[int, ...]]:
    return 0, ()
