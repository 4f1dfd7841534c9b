"""The pure functions that copy pages to the host, back, and inside a cache, and their lowering."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.packed_layout import NUM_PAGE_COPIES
from models.kv_cache import CacheGroup, KVCache
from models.sharding import Sharder

PAGE_CHUNK_SIZES = (4, 32)
"""Pages that one program moves, ascending; a chunk that is not full is padded by the null page.
Each page is an array of its own, which costs the host some 20 us a call (H200)."""
HOST_MEMORY = "pinned_host"
"""JAX's name of the host's memory that a GPU copies to and from at the speed of the bus."""
PAGE_AXES = (None, "layers", "page", "kv_heads", "head_dim")
"""Of a page on the host: its keys and values lie together."""


@dataclass(frozen=True, slots=True)
class PageChunk:
    """What the programs that move pages differ in.

    Attributes:
      group: index of the cache group.
      num_pages: that one call moves; one of `PAGE_CHUNK_SIZES`.
    """

    group: int
    num_pages: int


def read_pages(
    k_pages: jax.Array, v_pages: jax.Array, page_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copy pages out of a group.

    Args:
      k_pages: [L, P, B, K, H]; not donated.
      v_pages: the same.
      page_ids: int32[N], each inside the pages: out of bounds is undefined.

    Returns:
      Keys and values, each [N, L, B, K, H].
    """
    layers = jnp.arange(k_pages.shape[0])
    # Both leading axes are indexed: XLA turns an index of a later axis into a leading one by
    # transposing the operand, which is the whole cache.
    place = (layers[None, :], page_ids[:, None])
    keys, values = (pages.at[place].get(mode="promise_in_bounds") for pages in (k_pages, v_pages))
    return keys, values


def write_by_scatter(pages: jax.Array, page_ids: jax.Array, new: jax.Array) -> jax.Array:
    """Write pages by one scatter; the version for GPUs.

    Args:
      pages: [L, P, B, K, H]; donate it, and it is updated in place.
      page_ids: int32[N], each inside the pages. They differ, but for padding, which names page 0:
        that may end up as a mixture of what is written to it.
      new: [N, L, B, K, H] in the pages' dtype.

    Returns:
      The pages after the write.
    """
    place = (jnp.arange(pages.shape[0])[None, :], page_ids[:, None])
    return pages.at[place].set(new, mode="promise_in_bounds", unique_indices=True)


def write_by_loop(pages: jax.Array, page_ids: jax.Array, new: jax.Array) -> jax.Array:
    """The same, page by page; the version for CPUs, whose scatter copies what it writes."""

    def write_page(index: jax.Array, pages: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(new, index, 1).swapaxes(0, 1)
        return lax.dynamic_update_slice(pages, page, (0, page_ids[index], 0, 0, 0))

    return lax.fori_loop(0, page_ids.shape[0], write_page, pages)


def write_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_ids: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Copy keys and values into a group's pages; see `write_by_scatter`."""
    write = write_by_scatter if jax.default_backend() == "gpu" else write_by_loop
    return write(k_pages, page_ids, new_keys), write(v_pages, page_ids, new_values)


def offload_pages(
    k_pages: jax.Array, v_pages: jax.Array, page_ids: jax.Array
) -> tuple[jax.Array, ...]:
    """Copy pages out of a group, each into an array of its own.

    Args:
      k_pages: [L, P, B, K, H]; not donated.
      v_pages: the same.
      page_ids: int32[N], each inside the pages.

    Returns:
      N arrays [2, L, B, K, H], keys and values.
    """

    def read(page_id: jax.Array) -> jax.Array:
        found = [
            lax.dynamic_index_in_dim(pages, page_id, axis=1, keepdims=False)
            for pages in (k_pages, v_pages)
        ]
        return jnp.stack(found)

    return tuple(read(page_id) for page_id in page_ids)


def fetch_pages(
    k_pages: jax.Array, v_pages: jax.Array, page_ids: jax.Array, *new: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copy pages on the host into a group, one after the other.

    Args:
      k_pages: [L, P, B, K, H]; donate it, and it is updated in place.
      v_pages: the same.
      page_ids: int32[N], each inside the pages.
      new: N arrays [2, L, B, K, H], keys and values, in the pages' dtype.

    Returns:
      The keys' and the values' pages after the write.
    """
    for page_id, page in zip(page_ids, new, strict=True):
        keys, values = jax.device_put(page, jax.memory.Space.Device)
        place = (0, page_id, 0, 0, 0)
        k_pages = lax.dynamic_update_slice(k_pages, keys[:, None], place)
        v_pages = lax.dynamic_update_slice(v_pages, values[:, None], place)
    return k_pages, v_pages


def copy_pages(cache: KVCache, pairs: jax.Array) -> KVCache:
    """Copy pages to others, in all groups.

    Args:
      cache: donate it, and it is updated in place.
      pairs: int32[2, groups, NUM_PAGE_COPIES], sources and targets, each inside the pages. Targets
        differ, but for padding, which copies page 0 to itself; no source is a target.

    Returns:
      The cache after the copies.
    """
    sources, targets = pairs
    for index, group in enumerate(cache.groups):
        rows = read_pages(group.k_pages, group.v_pages, sources[index])
        # So that XLA does not read and write the cache in one kernel, for which it would copy it.
        rows = lax.optimization_barrier(rows)
        k_pages, v_pages = write_pages(group.k_pages, group.v_pages, targets[index], *rows)
        cache = cache.with_group(index, replace(group, k_pages=k_pages, v_pages=v_pages))
    return cache


def lower_copy(cache: KVCache, sharder: Sharder) -> jax.stages.Lowered:
    """Lower `copy_pages` for a cache of shapes, which is donated."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, cache)
    pairs = sharder.replicated((2, len(cache.groups), NUM_PAGE_COPIES), "int32")
    jitted = jax.jit(copy_pages, donate_argnums=0, out_shardings=shardings)
    return jitted.lower(cache, pairs)


def lower_offload(group: CacheGroup, num_pages: int, sharder: Sharder) -> jax.stages.Lowered:
    """Lower `offload_pages` for a group of shapes; the outputs are in the host's memory."""
    page, page_ids = _abstract_page(group, sharder), sharder.replicated((num_pages,), "int32")
    jitted = jax.jit(offload_pages, out_shardings=(page.sharding,) * num_pages)
    return jitted.lower(group.k_pages, group.v_pages, page_ids)


def lower_fetch(group: CacheGroup, num_pages: int, sharder: Sharder) -> jax.stages.Lowered:
    """Lower `fetch_pages` for a group of shapes, which is donated."""
    page, page_ids = _abstract_page(group, sharder), sharder.replicated((num_pages,), "int32")
    shardings = (group.k_pages.sharding, group.v_pages.sharding)
    jitted = jax.jit(fetch_pages, donate_argnums=(0, 1), out_shardings=shardings)
    return jitted.lower(group.k_pages, group.v_pages, page_ids, *(page,) * num_pages)


def _abstract_page(group: CacheGroup, sharder: Sharder) -> jax.ShapeDtypeStruct:
    """Keys and values of a page in the host's memory."""
    num_layers, _, *page_shape = group.k_pages.shape
    shape = (2, num_layers, *page_shape)
    sharding = sharder.sharding(shape, PAGE_AXES).with_memory_kind(HOST_MEMORY)
    return jax.ShapeDtypeStruct(shape, group.k_pages.dtype, sharding=sharding)
