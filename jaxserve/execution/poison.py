"""PagePoisoner: NaN in every page that no one may read, so that who reads one is found out.

For debugging: a wrong page table entry reads another request's keys and values, without any error.
Programs run in the order of their dispatch, so a page is overwritten when the steps that still
read it for its old owner are done, and before the new owner writes to it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import EngineConfigError
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.step import ScheduledRow, SchedulerOutput
from models.kv_cache import KVCache
from models.sharding import Sharder

PAGES_PER_CALL = 256
_NO_PAGE = np.iinfo(np.int32).max


class PagePoisoner:
    """Overwrites pages that have come free since the last step.

    A free page that the prefix cache knows is not blank: it may be taken again as it is. A page
    that another sequence holds is not blank either: reading that one is not found out.
    """

    def __init__(self, page_pools: tuple[PagePool, ...], abstract_cache: KVCache, sharder: Sharder):
        """Compile the program.

        Args:
          page_pools: of the scheduler.
          abstract_cache: shapes and shardings.
          sharder: of the devices that share the cache.

        Raises:
          EngineConfigError: the cache's type has no NaN.
        """
        dtypes = {group.k_pages.dtype for group in abstract_cache.groups}
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            names = ", ".join(sorted(dtype.name for dtype in dtypes))
            raise EngineConfigError(f"debug_poison_pages needs floating-point pages; got {names}")
        self._pools = page_pools
        self._poisoned: tuple[set[int], ...] = tuple(set() for _ in page_pools)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_cache)
        jitted = jax.jit(_poison, donate_argnums=0, out_shardings=shardings)
        pages = sharder.replicated((len(page_pools), PAGES_PER_CALL), "int32")
        self._program = jitted.lower(abstract_cache, pages).compile()

    def poison_before(self, output: SchedulerOutput, runner: ModelRunner) -> None:
        """Overwrite, ahead of a step, all blank pages, and those that it writes to first."""
        fresh = [self._fresh_pages(output, group) for group in range(len(self._pools))]
        blank = [set(pool.blank_pages) for pool in self._pools]
        missing = [
            sorted((new | free) - poisoned)
            for new, free, poisoned in zip(fresh, blank, self._poisoned, strict=True)
        ]
        changes = []
        for start in range(0, max(map(len, missing)), PAGES_PER_CALL):
            pages = np.full((len(missing), PAGES_PER_CALL), _NO_PAGE, np.int32)
            for row, numbers in zip(pages, missing, strict=True):
                part = numbers[start : start + PAGES_PER_CALL]
                row[: len(part)] = part
            changes.append(functools.partial(self._overwrite, pages))
        runner.change_cache_in_next_step(changes)
        self._poisoned = tuple(blank)

    def forget(self) -> None:
        """A step has failed: whatever was overwritten ahead of it may not be."""
        self._poisoned = tuple(set() for _ in self._pools)

    def explain(self, row: ScheduledRow, runner: ModelRunner) -> str:
        """Tell of the blank and foreign pages in a row's page tables; empty if there are none."""
        slot = row.sequence.state_slot
        if slot is None or not runner.is_intact():
            return ""
        found = []
        for group, table in enumerate(runner.device_page_tables(slot)):
            blank = set(self._pools[group].blank_pages)
            for index, own in enumerate(row.sequence.page_tables[group]):
                if own and (table[index] != own or own in blank):
                    found.append(f"page {table[index]} at {index} of group {group}")
        return f"its page tables hold {', '.join(found)}, which it does not own" if found else ""

    def _overwrite(self, pages: np.ndarray, cache: KVCache) -> KVCache:
        return self._program(cache, pages)

    def _fresh_pages(self, output: SchedulerOutput, group: int) -> set[int]:
        """Pages that sequences got for this step, without those found in the prefix cache."""
        page_size = self._pools[group].page_size
        return {
            page
            for row in output.rows
            for index, page in row.new_pages[group]
            if index * page_size >= row.start
        }


def _poison(cache: KVCache, pages: jax.Array) -> KVCache:
    """The cache with NaN in int32[groups, PAGES_PER_CALL]; entries beyond it are dropped."""
    for index, group in enumerate(cache.groups):
        changed = {
            name: getattr(group, name).at[:, pages[index]].set(jnp.nan, mode="drop")
            for name in ("k_pages", "v_pages")
        }
        cache = cache.with_group(index, dataclasses.replace(group, **changed))
    return cache
