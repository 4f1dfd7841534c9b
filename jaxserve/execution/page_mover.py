"""PageMover: copies pages between the device's cache and the host's slots, ahead of a step."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxserve.execution.host_pages import HostPages
from jaxserve.execution.page_functions import PAGE_CHUNK_SIZES, PageChunk
from jaxserve.execution.programs import ProgramTable
from jaxserve.step import PageMove
from models.kv_cache import CacheGroup, KVCache

logger = logging.getLogger(__name__)

MAX_PENDING_PAGES = 2 * PAGE_CHUNK_SIZES[-1]
"""Pages, padding included, that may be on their way to the host; each has a copy on the device."""
MAX_DEVICE_PAGES = MAX_PENDING_PAGES + 2 * PAGE_CHUNK_SIZES[-1]
"""Pages beside the cache that the device holds at most: those, and two chunks that come back."""


@dataclass(frozen=True, slots=True)
class PageSeconds:
    """What moving one page of every group took, in full chunks and with an idle device.

    Attributes:
      offload: from the device to its slot.
      fetch: from the slot to the device.
    """

    offload: float
    fetch: float


@dataclass(frozen=True, slots=True)
class _Landing:
    """A chunk on its way to the host; `done` raises what went wrong."""

    chunk: PageChunk
    slots: frozenset[int]
    done: Future[None]


class PageMover:
    """Moves pages; the programs of the step wait for them in the device's order.

    A page on its way to the host is copied out of the cache at once, on the device. A thread of
    its own waits for the copy and writes the slots, in the order of the moves, so that the loop
    goes on; it must not touch the cache.

    Attributes:
      num_offloaded_bytes: that were sent to the host, without padding.
      num_fetched_bytes: that were sent back, without padding.
      waited_seconds: that the loop waited for pages on their way to the host: for a slot to be
        filled, or because too many were on their way.
      seconds_per_page: measured at the start; None before.
    """

    def __init__(self, programs: ProgramTable, host_pages: HostPages):
        self._programs, self._host_pages = programs, host_pages
        self._pending: deque[_Landing] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pages")
        self.num_offloaded_bytes = self.num_fetched_bytes = 0
        self.waited_seconds = 0.0
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
            # Of moves to one slot the last counts: a chunk's rows land in no order of their own.
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
        self._wait_for(len(self._pending))

    def drop_pending(self) -> bool:
        """Wait for all that is on its way, and forget what failed; for use after a failed step.

        Returns:
          Whether anything failed: then its slots hold nothing of use.
        """
        errors = [landing.done.exception() for landing in self._pending]
        self._pending.clear()
        return any(errors)

    def measure(self, cache: KVCache) -> KVCache:
        """Time both directions for `seconds_per_page`; the null page and any slot are overwritten.

        Args:
          cache: donated.
        """
        num_pages = min(PAGE_CHUNK_SIZES[-1], self._host_pages.num_slots)
        offload = fetch = 0.0
        for group in range(self._host_pages.num_groups):
            cache, _ = self._time_chunk(cache, group, num_pages)  # pays for the buffers
            cache, seconds = self._time_chunk(cache, group, num_pages)
            offload += seconds.offload / num_pages
            fetch += seconds.fetch / num_pages
        self.waited_seconds = 0.0
        self.seconds_per_page = PageSeconds(offload, fetch)
        self._log_speed(self.seconds_per_page)
        return cache

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
            self._make_room(chunk.num_pages)
            page_ids = _padded(chunk, [move.page for move in part])
            read = self._programs.read_pages(chunk)
            keys, values = read(group.k_pages, group.v_pages, page_ids)
            keys.copy_to_host_async()
            values.copy_to_host_async()
            slots = [move.host_slot for move in part]
            done = self._thread.submit(self._land, index, slots, keys, values)
            self._pending.append(_Landing(chunk, frozenset(slots), done))

    def _fetch(self, group: CacheGroup, index: int, moves: Sequence[PageMove]) -> CacheGroup:
        self._wait_for_slots(index, {move.host_slot for move in moves})
        for chunk, part in _chunks(index, moves):
            page_ids = _padded(chunk, [move.page for move in part])
            slots = [move.host_slot for move in part]
            rows = self._host_pages.read(index, slots, chunk.num_pages)
            write = self._programs.write_pages(chunk)
            k_pages, v_pages = write(group.k_pages, group.v_pages, page_ids, *rows)
            group = replace(group, k_pages=k_pages, v_pages=v_pages)
        return group

    def _land(self, group: int, slots: list[int], keys: jax.Array, values: jax.Array) -> None:
        self._host_pages.write(group, slots, np.asarray(keys), np.asarray(values))

    def _make_room(self, num_pages: int) -> None:
        """Wait for the oldest pages until so many more may be on their way."""
        excess = sum(landing.chunk.num_pages for landing in self._pending)
        excess += num_pages - MAX_PENDING_PAGES
        count = 0
        for landing in self._pending:
            if excess <= 0:
                break
            excess -= landing.chunk.num_pages
            count += 1
        self._wait_for(count)

    def _wait_for_slots(self, group: int, slots: set[int]) -> None:
        """Wait for what is on its way to these slots; all that is older lands before it."""
        last = 0
        for count, landing in enumerate(self._pending, start=1):
            if landing.chunk.group == group and not slots.isdisjoint(landing.slots):
                last = count
        self._wait_for(last)

    def _wait_for(self, count: int) -> None:
        start = time.perf_counter()
        for _ in range(count):
            self._pop_landed()
        self.waited_seconds += time.perf_counter() - start if count else 0.0

    def _drop_landed(self) -> None:
        while self._pending and self._pending[0].done.done():
            self._pop_landed()

    def _pop_landed(self) -> None:
        """Take the oldest away once it has landed.

        One that failed stays, so that each later step fails too, until `drop_pending`: its slots
        hold nothing of use.
        """
        self._pending[0].done.result()
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
