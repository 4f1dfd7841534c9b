"""CopyOnWrite: a sequence goes on from a page that another one has begun, in a copy of its own."""

from array import array

from jaxserve.request import Sequence
from jaxserve.scheduling.page_digests import root_digest
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.step import PageCopy


class CopyOnWrite:
    """Finds pages that hold the next tokens of a sequence but not only them, and has them copied.

    Full pages are shared as they are (`PrefixIndex`); this is for the one page behind them, whose
    first tokens alone are the same: the last page of a prompt or of an earlier turn. The last known
    token of a sequence is left to compute, so a copy is never full.

    The source is held until the step is built, so nobody gets it for this step; who gets it for a
    later one writes after the copy, since programs run in order. It stays what it was, and the copy
    is nobody else's before its owner's prompt is computed. So a step that is taken back leaves
    nothing to forget.

    Where groups have pages of different sizes, or without a prefix cache, nothing is found.

    Attributes:
      num_copied_pages: in all groups, since the start.
    """

    def __init__(self, page_pools: tuple[PagePool, ...], *, is_enabled: bool):
        """Start without copies."""
        sizes = {pool.page_size for pool in page_pools}
        self._pools = page_pools
        # A page of one token is never partial, so this size finds and remembers nothing.
        self._size = sizes.pop() if is_enabled and len(sizes) == 1 else 1
        self._copies: list[PageCopy] = []
        self.num_copied_pages = 0

    @property
    def num_pending(self) -> int:
        """Copies that no step has taken yet; their sources are held."""
        return len(self._copies)

    def find(self, sequence: Sequence, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Look for the page behind the full ones.

        Args:
          sequence: waits.
          num_tokens: in the full pages that were found.

        Returns:
          How many tokens more a copy gives, and its source in each group; 0 and () if there is
          none.
        """
        known = sequence.token_ids
        end = min(num_tokens + self._size, len(known)) - 1
        if end <= num_tokens:
            return 0, ()
        if len(known) == num_tokens + self._size and (pages := self._find_full(sequence)):
            return end - num_tokens, pages
        parent = self._parent(sequence, num_tokens)
        if not self._pools[0].cache.partials.has_any(parent):
            return 0, ()
        wanted = array("i", known[num_tokens:end]).tobytes()
        found = [pool.cache.partials.find(parent, wanted) for pool in self._pools]
        num_copied = min(count for _, count in found)
        return (num_copied, tuple(page for page, _ in found)) if num_copied else (0, ())

    def count_taken(self, group: int, sources: tuple[int, ...]) -> int:
        """Free pages of a group that an admission takes for a copy and, meanwhile, its source."""
        return 1 + self._pools[group].cache.is_idle(sources[group]) if sources else 0

    def hold(self, group: int, source: int) -> None:
        """Hold a source; before pages of its group are given out, which may evict it."""
        self._pools[group].take_cached((source,))

    def copy(self, group: int, source: int) -> int:
        """Have a source that is held copied ahead of the step; returns the new page."""
        pages = self._pools[group].allocate(1)
        assert pages is not None
        self._copies.append(PageCopy(group=group, source=source, page=pages[0]))
        self.num_copied_pages += 1
        return pages[0]

    def take_copies(self) -> tuple[PageCopy, ...]:
        """The copies that must run before the step that is being built; sources are let go."""
        copies, self._copies = self._copies, []
        for copy in copies:
            self._pools[copy.group].free((copy.source,))
        return tuple(copies)

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Remember the last page of a sequence, if it is not full.

        Args:
          sequence: holds its pages.
          num_tokens: known ones, whose keys and values committed steps have written.
        """
        count = num_tokens % self._size
        if not count:
            return
        parent = self._parent(sequence, num_tokens)
        content = array("i", sequence.token_ids[num_tokens - count : num_tokens]).tobytes()
        for table, pool in zip(sequence.page_tables, self._pools, strict=True):
            page = table[num_tokens // self._size]
            if page:
                pool.add_partial(page, parent, content)

    def name_tail(self, sequence: Sequence) -> bytes:
        """What names the tokens behind the last page that a hit can hold in full.

        Empty where a copy would bring none of them.
        """
        known = sequence.token_ids
        start = (len(known) - 1) // self._size * self._size
        if len(known) - start <= 1:
            return b""
        return self._parent(sequence, start) + array("i", known[start:]).tobytes()

    def _parent(self, sequence: Sequence, num_tokens: int) -> bytes:
        """The digest of all full pages before a token."""
        index = num_tokens // self._size
        if not index:
            return root_digest(sequence.request.cache_salt)
        return sequence.page_digests[0].up_to(index)[index - 1][0]

    def _find_full(self, sequence: Sequence) -> tuple[int, ...]:
        """The pages that hold the last tokens of a sequence, which just fill them."""
        name = sequence.page_digests[0].up_to(len(sequence.token_ids) // self._size)[-1]
        pages = [page for pool in self._pools if (page := pool.cache.find(name)) is not None]
        return tuple(pages) if len(pages) == len(self._pools) else ()
