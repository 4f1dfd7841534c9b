"""PageMover: copies pages between the device's cache and the host's slots, ahead of a step."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxserve.execution.host_pages import HostPages
from jaxserve.execution.page_functions import PAGE_CHUNK_SIZES, PageChunk
from jaxserve.execution.programs import ProgramTable
from jaxserve.step import PageMove
from models.kv_cache import CacheGroup, KVCache

logger = logging.getLogger(__name__)

MAX_DEVICE_PAGES = 2 * PAGE_CHUNK_SIZES[-1]
"""Pages beside the cache that the device holds at most: a chunk that leaves and one that comes."""


@dataclass(frozen=True, slots=True)
class PageSeconds:
    """What moving one page of every group took, in full chunks and with an idle device.

    Attributes:
      offload: from the device to its slot.
      fetch: from the slot to the device.
    """

    offload: float
    fetch: float


class PageMover:
    """Moves pages; all is ordered by the device and the arrays, so that the loop never waits.

    A step that overwrites a page runs after the program that copies it out. A program that fetches
    a page takes the array of its slot, which may still be on its way.

    Attributes:
      num_offloaded_bytes: that were sent to the host, without padding.
      num_fetched_bytes: that were sent back, without padding.
      seconds_per_page: measured at the start; None before.
    """

    def __init__(self, programs: ProgramTable, host_pages: HostPages):
        self._programs, self._host_pages = programs, host_pages
        self._pending: deque[jax.Array] = deque()  # a page of each chunk on its way to the host
        self.num_offloaded_bytes = self.num_fetched_bytes = 0
        self.seconds_per_page: PageSeconds | None = None

    def apply(
        self, offloads: Sequence[PageMove], fetches: Sequence[PageMove], cache: KVCache
    ) -> KVCache:
        """Start all offloads and then all fetches; see `SchedulerOutput`.

        Args:
          offloads: device pages to copy into slots.
          fetches: slots to copy into device pages.
          cache: donated where there is something to fetch.

        Returns:
          The cache with the fetched pages.

        Raises:
          Exception: an offload of this or of an earlier call failed, or the device did.
        """
        self._drop_landed()
        for group, moves in _by_group(offloads):
            of_slots = list({move.host_slot: move for move in moves}.values())
            self._offload(cache.groups[group], group, of_slots)
            self.num_offloaded_bytes += len(of_slots) * self._host_pages.bytes_per_page(group)
        for group, moves in _by_group(fetches):
            of_pages = list({move.page: move for move in moves}.values())
            cache = cache.with_group(group, self._fetch(cache.groups[group], group, of_pages))
            self.num_fetched_bytes += len(of_pages) * self._host_pages.bytes_per_page(group)
        return cache

    def land_all(self) -> None:
        """Wait until all slots are filled; raises what went wrong."""
        while self._pending:
            self._pop_landed()

    def drop_pending(self) -> bool:
        """Wait for all that is on its way, and forget what failed; for use after a failed step.

        Returns:
          Whether anything failed: then its slots hold nothing of use.
        """
        has_failed = False
        while self._pending:
            try:
                self._pop_landed()
            except Exception as error:
                logger.warning("pages did not get to the host: %s", error)
                self._pending.popleft()
                has_failed = True
        return has_failed

    def clear(self) -> None:
        """Empty all slots and free their memory; nothing may refer to them any more."""
        self._pending.clear()
        self._host_pages.clear()

    def measure(self, cache: KVCache) -> KVCache:
        """Time both directions for `seconds_per_page`; the null page is overwritten.

        Args:
          cache: donated.
        """
        num_pages = min(PAGE_CHUNK_SIZES[-1], self._host_pages.num_slots)
        offload = fetch = 0.0
        for group in range(self._host_pages.num_groups):
            for _ in range(2):  # pays for the memory: old pages stay until the new ones are there
                cache, _ = self._time_chunk(cache, group, num_pages)
            cache, seconds = self._time_chunk(cache, group, num_pages)
            offload += seconds.offload / num_pages
            fetch += seconds.fetch / num_pages
        self.clear()
        self.seconds_per_page = PageSeconds(offload, fetch)
        self._log_speed(self.seconds_per_page)
        return cache

    def take_memory(self, cache: KVCache) -> None:
        """Fill all slots once, so that XLA takes their memory now and keeps it.

        Pinning takes 0.4 s a GB (H200), for which steps would have to wait later.

        Args:
          cache: its null page is copied; not donated.
        """
        start, host_pages = time.monotonic(), self._host_pages
        slots = [*range(host_pages.num_slots), *range(min(MAX_DEVICE_PAGES, host_pages.num_slots))]
        for group in range(host_pages.num_groups):
            moves = [PageMove(group=group, page=0, host_slot=slot) for slot in slots]
            self._offload(cache.groups[group], group, moves)
        self.land_all()
        self.clear()
        logger.info("the host tier's memory is taken in %.1f s", time.monotonic() - start)

    def _time_chunk(
        self, cache: KVCache, group: int, num_pages: int
    ) -> tuple[KVCache, PageSeconds]:
        """Move so many pages to the host and back, and wait for each."""
        moves = [PageMove(group=group, page=0, host_slot=slot) for slot in range(num_pages)]
        jax.block_until_ready(cache)
        start = time.perf_counter()
        self._offload(cache.groups[group], group, moves)
        self.land_all()
        landed = time.perf_counter()
        cache = cache.with_group(group, self._fetch(cache.groups[group], group, moves))
        jax.block_until_ready(cache)
        return cache, PageSeconds(landed - start, time.perf_counter() - landed)

    def _offload(self, group: CacheGroup, index: int, moves: Sequence[PageMove]) -> None:
        for chunk, part in _chunks(index, moves):
            page_ids = _padded(chunk, [move.page for move in part])
            pages = self._programs.offload(chunk)(group.k_pages, group.v_pages, page_ids)
            self._host_pages.put(index, [move.host_slot for move in part], pages[: len(part)])
            self._pending.append(pages[0])

    def _fetch(self, group: CacheGroup, index: int, moves: Sequence[PageMove]) -> CacheGroup:
        for chunk, part in _chunks(index, moves):
            page_ids = _padded(chunk, [move.page for move in part])
            pages = self._host_pages.get(index, [move.host_slot for move in part])
            pages += pages[-1:] * (chunk.num_pages - len(part))  # for the null page
            fetch = self._programs.fetch(chunk)
            k_pages, v_pages = fetch(group.k_pages, group.v_pages, page_ids, *pages)
            group = replace(group, k_pages=k_pages, v_pages=v_pages)
        return group

    def _drop_landed(self) -> None:
        # jax.Array's own class has `is_ready`; its stub does not.
        while self._pending and self._pending[0].is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            self._pop_landed()

    def _pop_landed(self) -> None:
        """Wait for the oldest, and take it away.

        One that failed stays, so that each later step fails too, until `drop_pending`: its slots
        hold nothing of use.
        """
        self._pending[0].block_until_ready()
        self._pending.popleft()

    def _log_speed(self, seconds: PageSeconds) -> None:
        groups = range(self._host_pages.num_groups)
        num_bytes = sum(self._host_pages.bytes_per_page(group) for group in groups)
        logger.info(
            "pages of %.1f KiB go to the host at %.1f GB/s and come back at %.1f GB/s",
            num_bytes / 2**10,
            num_bytes / seconds.offload / 1e9,
            num_bytes / seconds.fetch / 1e9,
        )


def _by_group(moves: Sequence[PageMove]) -> list[tuple[int, list[PageMove]]]:
    groups: dict[int, list[PageMove]] = {}
    for move in moves:
        groups.setdefault(move.group, []).append(move)
    return list(groups.items())


def _chunks(
    group: int, moves: Sequence[PageMove]
) -> Iterator[tuple[PageChunk, Sequence[PageMove]]]:
    """Cut moves into the sizes of programs; less than half of a large chunk goes in small ones."""
    small, large = PAGE_CHUNK_SIZES
    start = 0
    while start < len(moves):
        size = large if len(moves) - start > large // 2 else small
        yield PageChunk(group, size), moves[start : start + size]
        start += size


def _padded(chunk: PageChunk, page_ids: Sequence[int]) -> np.ndarray:
    """int32[N]: the ids, and the null page to the end of the chunk."""
    padded = np.zeros(chunk.num_pages, np.int32)
    padded[: len(page_ids)] = page_ids
    return padded
