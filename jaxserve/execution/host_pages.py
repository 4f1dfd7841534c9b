"""HostPages: the slots of the host's memory that pages of the cache are copied to."""

import os
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

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
    """Keys and values in slots, the same number for each cache group; numpy only.

    Of a cache that several devices share, a slot holds a page whole. The memory is taken up when a
    slot is first written.

    Attributes:
      num_slots: of each group.
      k_pages: for each group [num_slots, L, B, K, H] in the geometry's dtype.
      v_pages: the same.
    """

    def __init__(self, geometries: Sequence[CacheGeometry], num_slots: int):
        self.num_slots = num_slots
        self.k_pages = tuple(_allocate(geometry, num_slots) for geometry in geometries)
        self.v_pages = tuple(_allocate(geometry, num_slots) for geometry in geometries)

    @property
    def num_groups(self) -> int:
        """Cache groups."""
        return len(self.k_pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(array.nbytes for array in self.k_pages + self.v_pages)

    def bytes_per_page(self, group: int) -> int:
        """Bytes of one slot of a group, keys and values."""
        return (self.k_pages[group].nbytes + self.v_pages[group].nbytes) // self.num_slots

    def write(self, group: int, slots: Sequence[int], keys: np.ndarray, values: np.ndarray) -> None:
        """Fill slots.

        Args:
          group: index of the cache group.
          slots: n of them, which differ.
          keys: [N, L, B, K, H], N >= n; row i goes to the slot i, and the rest nowhere.
          values: the same.
        """
        for pages, new in ((self.k_pages[group], keys), (self.v_pages[group], values)):
            for row, slot in zip(new, slots, strict=False):
                pages[slot] = row

    def read(
        self, group: int, slots: Sequence[int], num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copies of slots, which later writes do not change.

        Args:
          group: index of the cache group.
          slots: n of them.
          num_rows: N >= n.

        Returns:
          Keys and values, each [N, L, B, K, H]; the rows from n on hold anything.
        """
        found = []
        for pages in (self.k_pages[group], self.v_pages[group]):
            rows = np.empty((num_rows, *pages.shape[1:]), pages.dtype)
            for row, slot in zip(rows, slots, strict=False):
                row[...] = pages[slot]
            found.append(rows)
        keys, values = found
        return keys, values


def _allocate(geometry: CacheGeometry, num_slots: int) -> np.ndarray:
    g = geometry
    shape = (num_slots, g.num_layers, g.page_size, g.num_kv_heads, g.stored_head_dim)
    return np.empty(shape, jnp.dtype(g.dtype))
