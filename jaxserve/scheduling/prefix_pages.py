"""PrefixPages: the full pages of one prefix in the pools of all cache groups, outside any step."""

import math
from collections.abc import Callable, Sequence

from jaxserve.errors import InvalidRequestError
from jaxserve.scheduling.page_digests import PageDigests
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.step import PageMove

WritePages = Callable[[int, list[PageMove], list[int], list[int]], None]
"""Called with a group, offloads to run first, and which of the given pages go to which ids."""


class PrefixPages:
    """Finds the pages of a prefix, or takes pages for it and makes the prefix cache know them.

    No step may be in flight, and none may be scheduled between two calls.

    Attributes:
      num_tokens: that full pages of every group hold.
    """

    def __init__(self, pools: Sequence[PagePool], token_ids: Sequence[int], root: bytes):
        """Name the pages.

        Args:
          pools: of the cache groups.
          token_ids: of the prefix; what fills no page is left out.
          root: of `root_digest`.
        """
        self._pools = pools
        self._step = math.lcm(*(pool.page_size for pool in pools))
        self.num_tokens = len(token_ids) // self._step * self._step
        ids = list(token_ids[: self.num_tokens])
        self._names = [
            PageDigests(root, ids, pool.page_size).up_to(self.num_tokens // pool.page_size)
            for pool in pools
        ]

    def find(self) -> list[list[int]] | None:
        """For each group the device pages that a sequence with this prefix needs, the last ones.

        Of a sliding window these are what the next token sees, and what the last token of the
        prefix sees if it is there, too: a prompt that ends with the prefix computes that token.

        Returns:
          The pages; None if one of them is not on the device.
        """
        tables = []
        for pool, names in zip(self._pools, self._names, strict=True):
            for token in (self.num_tokens - self._step, self.num_tokens):
                first = pool.num_dead_pages(token)
                found = [pool.cache.find(name) for name in names[first:]]
                pages = [page for page in found if page is not None]
                if len(pages) == len(found):
                    break
            else:
                return None
            tables.append(pages)
        return tables

    def accepts(self, num_pages: Sequence[int]) -> bool:
        """Whether so many pages of each group, the last ones, are enough for the next token."""
        pairs = zip(self._pools, self._names, num_pages, strict=True)
        return all(
            len(names) - pool.num_dead_pages(self.num_tokens) <= count <= len(names)
            for pool, names, count in pairs
        )

    def fill(self, num_pages: Sequence[int], write: WritePages) -> None:
        """Write the pages that are not on the device yet, and remember them as idle.

        Args:
          num_pages: of each group, the last ones.
          write: copies pages; it raises if it cannot.

        Raises:
          InvalidRequestError: a pool has too few free pages; nothing is held then.
        """
        for group, count in enumerate(num_pages):
            names = self._names[group][len(self._names[group]) - count :]
            pool = self._pools[group]
            known = {i: page for i, name in enumerate(names) if (page := pool.cache.find(name))}
            pool.take_cached(known.values())  # so that taking pages does not evict them
            table, missing = known, [i for i in range(count) if i not in known]
            try:
                new = pool.allocate(len(missing))
                if new is None:
                    raise InvalidRequestError(
                        f"the KV cache must have {len(missing)} free pages for the prefix; "
                        f"got {pool.num_free}"
                    )
                table = known | dict(zip(missing, new, strict=True))
                moves = [
                    PageMove(group=group, page=page, host_slot=slot)
                    for page, slot in pool.take_evicted()
                ]
                if missing:
                    write(group, moves, missing, new)
                for index, page in zip(missing, new, strict=True):
                    pool.cache.add(page, names[index])
            finally:  # the last page first: that is the order of eviction
                pool.free(table[index] for index in sorted(table, reverse=True))
