"""HostPages: the slots of the host's memory that pages of the cache are copied to."""

import os
from collections.abc import Sequence

import jax

from jaxserve.errors import EngineConfigError
from models.kv_cache import CacheGeometry


def count_host_pages(geometries: Sequence[CacheGeometry], num_bytes: int) -> int:
    """Slots of each group that so many bytes hold; a slot of all groups together is one page.

    Args:
      geometries: of the cache groups.
      num_bytes: of all devices' keys and values; 0 = there is no host tier.

    Raises:
      EngineConfigError: there are bytes, but not enough for one page of each group.
    """
    bytes_per_page = sum(geometry.bytes_per_page for geometry in geometries)
    if 0 < num_bytes < bytes_per_page:
        raise EngineConfigError(
            f"kv_offloading_size must hold at least a page of {bytes_per_page} bytes; "
            f"got {num_bytes} bytes"
        )
    return num_bytes // bytes_per_page


def check_host_memory(num_bytes: int) -> None:
    """Refuse more than the machine has: it would be killed as the pages fill, not at the start.

    Raises:
      EngineConfigError: the pages do not fit the host's memory.
    """
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > host_bytes:
        raise EngineConfigError(
            f"kv_offloading_size must be at most the host's memory, {host_bytes / 2**30:.2f} GiB; "
            f"got {num_bytes / 2**30:.2f} GiB"
        )


class HostPages:
    """Arrays in slots, the same number for each cache group; empty at first.

    A page is an array of its own, in memory that the devices copy to and from directly. Its memory
    is free again when the slot gets another and no program reads it any more.

    Attributes:
      num_slots: of each group.
    """

    def __init__(self, geometries: Sequence[CacheGeometry], num_slots: int):
        self.num_slots = num_slots
        self._bytes_per_page = [geometry.bytes_per_page for geometry in geometries]
        self._pages: list[list[jax.Array | None]]
        self.clear()

    @property
    def num_groups(self) -> int:
        """Cache groups."""
        return len(self._bytes_per_page)

    def bytes_per_page(self, group: int) -> int:
        """Bytes of one slot of a group, keys and values."""
        return self._bytes_per_page[group]

    def put(self, group: int, slots: Sequence[int], pages: Sequence[jax.Array]) -> None:
        """Fill slots.

        Args:
          group: index of the cache group.
          slots: n of them.
          pages: for each slot [2, L, B, K, H], keys and values; they may be on their way.
        """
        for slot, page in zip(slots, pages, strict=True):
            self._pages[group][slot] = page

    def get(self, group: int, slots: Sequence[int]) -> list[jax.Array]:
        """The pages in slots; each must have been filled since the last `clear`."""
        found = [page for slot in slots if (page := self._pages[group][slot]) is not None]
        assert len(found) == len(slots), f"slots {slots} of group {group} must have been filled"
        return found

    def clear(self) -> None:
        """Empty all slots."""
        self._pages = [[None] * self.num_slots for _ in self._bytes_per_page]
