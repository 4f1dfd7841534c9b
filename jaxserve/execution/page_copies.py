"""Copies of single pages between a cache and numpy arrays, without a host tier.

The programs are compiled at their first use, not at the start: few users need them. They move a
small chunk at a time, so that what they hold beside the cache fits the reserve of the memory plan.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxserve.execution.page_functions import read_pages, write_pages
from models.kv_cache import KVCache

CHUNK_PAGES = 8
_read = jax.jit(read_pages)


def copy_out(cache: KVCache, group: int, pages: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Copy pages of one group to the host.

    Args:
      cache: not donated.
      group: index of the group.
      pages: N ids.

    Returns:
      Keys and values, each [N, L, B, K, H] in the cache's dtype.
    """
    source = cache.groups[group]
    num_layers, _, *page_shape = source.k_pages.shape
    shape = (len(pages), num_layers, *page_shape)
    keys, values = (np.empty(shape, source.k_pages.dtype) for _ in range(2))
    for start in range(0, len(pages), CHUNK_PAGES):
        part = pages[start : start + CHUNK_PAGES]
        chunk = _read(source.k_pages, source.v_pages, _pad(part))
        for rows, new in zip((keys, values), chunk, strict=True):
            rows[start : start + len(part)] = np.asarray(new)[: len(part)]
    return keys, values


def copy_in(
    cache: KVCache,
    group: int,
    pages: Sequence[int],
    rows: Sequence[int],
    keys: np.ndarray,
    values: np.ndarray,
) -> KVCache:
    """Copy rows of host arrays into pages of one group.

    Args:
      cache: donated.
      group: index of the group.
      pages: N ids, which differ.
      rows: N indices into the arrays.
      keys: [M, L, B, K, H] in the cache's dtype.
      values: the same.

    Returns:
      The cache with these pages.
    """
    target = cache.groups[group]
    shardings = (target.k_pages.sharding, target.v_pages.sharding)
    write = jax.jit(write_pages, donate_argnums=(0, 1), out_shardings=shardings)
    k_pages, v_pages = target.k_pages, target.v_pages
    for start in range(0, len(pages), CHUNK_PAGES):
        part, chosen = pages[start : start + CHUNK_PAGES], rows[start : start + CHUNK_PAGES]
        chunk = [_pad_rows(array, chosen) for array in (keys, values)]
        k_pages, v_pages = write(k_pages, v_pages, _pad(part), *chunk)
    return cache.with_group(group, replace(target, k_pages=k_pages, v_pages=v_pages))


def _pad(pages: Sequence[int]) -> np.ndarray:
    """int32[CHUNK_PAGES]: the ids, then the null page."""
    padded = np.zeros(CHUNK_PAGES, np.int32)
    padded[: len(pages)] = pages
    return padded


def _pad_rows(array: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """[CHUNK_PAGES, ...]: copies of the rows, then zeros for the null page."""
    padded = np.zeros((CHUNK_PAGES, *array.shape[1:]), array.dtype)
    padded[: len(rows)] = array[list(rows)]
    return padded
