"""PagePool: who owns which page of the KV memory of one cache group."""

from collections.abc import Iterable

from jaxserve.errors import EngineConfigError
from jaxserve.scheduling.host_cache import HostCache
from jaxserve.scheduling.page_cache import PageCache
from jaxserve.scheduling.page_digests import PageName
from jaxserve.scheduling.windows import count_dead_pages, count_pages_of_window

ON_HOST = -1
"""In place of a page that must first be fetched from the host's memory."""


class PagePool:
    """The pages of one cache group, each free or held by one or more references.

    A free page may be cached: it holds known tokens, and can be taken again as it is. Such pages
    are given out for other tokens only when no other page is free.

    Page 0 is the null page: padding rows read and write it, and it is never given out.

    Source: Kwon et al. 2023 (paged attention); vLLM calls a page a block.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        sliding_window: int | None = None,
        num_host_pages: int = 0,
    ):
        """Make a pool whose pages are all free.

        Args:
          num_pages: pages in the cache, the null page included; at least 2.
          page_size: tokens that a page holds; at least 1.
          sliding_window: tokens that a query of the group sees; at least 1, or None for all.
          num_host_pages: cached pages that the host's memory takes when they are evicted.

        Raises:
          EngineConfigError: a number is too small.
        """
        if num_pages < 2:
            raise EngineConfigError(f"num_pages must be at least 2; got {num_pages}")
        if page_size < 1:
            raise EngineConfigError(f"page_size must be at least 1; got {page_size}")
        if sliding_window is not None and sliding_window < 1:
            raise EngineConfigError(f"sliding_window must be at least 1; got {sliding_window}")
        self.sliding_window = sliding_window
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache, self.host = PageCache(), HostCache(num_host_pages)
        self._evicted: list[tuple[int, int]] = []
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_references: dict[int, int] = {}  # of the pages that are held

    @property
    def num_usable(self) -> int:
        """Pages that can be given out: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that no one holds, cached ones included."""
        return len(self._free) + self.cache.num_idle

    @property
    def blank_pages(self) -> tuple[int, ...]:
        """Free pages that are not cached: no one may read them."""
        return tuple(self._free)

    @property
    def num_cached(self) -> int:
        """Cached pages that no one holds."""
        return self.cache.num_idle

    def num_references(self, page: int) -> int:
        """Count the references to a page."""
        return self._num_references.get(page, 0)

    def num_pages_for(self, num_tokens: int) -> int:
        """Count the pages that so many tokens need."""
        return -(-num_tokens // self.page_size)

    def num_dead_pages(self, next_token: int) -> int:
        """Count a sequence's leading pages that its tokens from `next_token` on do not see."""
        if self.sliding_window is None:
            return 0
        return count_dead_pages(next_token, window=self.sliding_window, page_size=self.page_size)

    def max_held_pages(self, num_tokens: int, max_row_tokens: int) -> int:
        """Count the pages that a sequence needs at most to compute so many tokens, row by row.

        Args:
          num_tokens: of the sequence.
          max_row_tokens: see `SchedulerConfig.max_row_tokens`.
        """
        num_pages = self.num_pages_for(num_tokens)
        if self.sliding_window is None:
            return num_pages
        of_window = count_pages_of_window(
            max_row_tokens, window=self.sliding_window, page_size=self.page_size
        )
        return min(num_pages, of_window)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Give out pages with one reference each: all that are asked for, or None.

        The page that was freed last is given out first; a cached one is evicted only when no
        other is free.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0; got {num_pages}")
        if num_pages > self.num_free:
            return None
        split = max(0, len(self._free) - num_pages)
        pages = self._free[split:]
        del self._free[split:]
        pages.reverse()
        pages += (self._evict() for _ in range(num_pages - len(pages)))
        for page in pages:
            self._num_references[page] = 1
        return pages

    def find_cached(self, names: list[PageName]) -> list[int]:
        """The pages of these names up to the first that is nowhere; `ON_HOST` for host slots."""
        pages, find = self.cache.find_first(names), self.cache.find
        if not self.host.num_slots:
            return pages
        for name in names[len(pages) :]:
            page = find(name)
            if page is None:
                if self.host.find(name) is None:
                    break
                page = ON_HOST
            pages.append(page)
        return pages

    def take_cached(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages, which are held or idle.

        Raises:
          ValueError: a page is neither, or is the null page.
        """
        counts = self._num_references
        for page in pages:
            count = counts.get(page, 0)
            if not count:
                if not self.cache.is_idle(page):
                    raise _not_held(page)
                self.cache.revive(page)
            counts[page] = count + 1

    def add_partial(self, page: int, parent: bytes, content: bytes) -> None:
        """Remember what a held page begins with; see `PageCache.add_partial`."""
        blank = self.cache.add_partial(page, parent, content)
        if blank is not None:
            self._free.append(blank)

    def take_evicted(self) -> list[tuple[int, int]]:
        """The `(page, host slot)` of all pages that were evicted since the last call.

        Whoever runs the next step must copy the pages to these slots first.
        """
        evicted, self._evicted = self._evicted, []
        return evicted

    def give_up_host(self) -> None:
        """Evicted pages are dropped from now on."""
        self.host = HostCache(0)

    def forget_cached(self) -> None:
        """Forget the content of all pages; those that are held stay with their holders."""
        self._free += self.cache.clear()
        self.host.clear()
        self._evicted.clear()

    def _evict(self) -> int:
        page, name = self.cache.evict()
        slot = None if name is None else self.host.put(name)
        if slot is not None:
            self._evicted.append((page, slot))
        return page

    def free(self, pages: Iterable[int]) -> None:
        """Take one reference from each page; pages without any can be given out again.

        Written for speed: all sequences of a batch may end in one step, with tens of thousands of
        pages, while the device has nothing to do.

        Raises:
          ValueError: a page is free already, or is the null page; those before it were taken.
        """
        counts, last = self._num_references, []
        try:
            for page in pages:
                count = counts.pop(page, 0)
                if count == 1:
                    last.append(page)
                elif count:
                    counts[page] = count - 1
                else:
                    raise _not_held(page)
        finally:
            self._free += self.cache.retire(last)

    def check_invariants(self) -> None:
        """Check that each page is either free or referenced, and the null page neither.

        Raises:
          RuntimeError: the pool's books disagree.
        """
        self.cache.check_invariants()
        self.host.check_invariants()
        num_held = len(self._num_references)
        if self.num_free + num_held != self.num_usable:
            message = "free and held pages must add up to"
            raise RuntimeError(
                f"{message} {self.num_usable}; got {self.num_free} free and {num_held} held"
            )
        free = {*self._free, *self.cache.idle_pages}
        if len(free) != self.num_free or 0 in free or 0 in self._num_references:
            raise RuntimeError(f"free pages must be distinct and not 0; got {sorted(self._free)}")
        if not free.isdisjoint(self._num_references):
            raise RuntimeError(f"free pages must have no reference; got {sorted(free)}")


def _not_held(page: int) -> ValueError:
    return ValueError(f"page must be one that the pool gave out and not free; got {page}")
