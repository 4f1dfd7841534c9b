"""The pure functions that copy pages out of a cache group and into it, and how they are lowered."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from models.kv_cache import CacheGroup
from models.sharding import Sharder

PAGE_CHUNK_SIZES = (8, 64)
"""Pages that one program moves, ascending; a chunk that is not full is padded by the null page."""
CHUNK_AXES = ("pages", "layers", "page", "kv_heads", "head_dim")
"""Of pages on their way: a page's layers lie together, as they do on the host."""


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


def lower_read(group: CacheGroup, num_pages: int, sharder: Sharder) -> jax.stages.Lowered:
    """Lower `read_pages` for a group of shapes."""
    chunk, page_ids = _abstract_chunk(group, num_pages, sharder)
    jitted = jax.jit(read_pages, out_shardings=(chunk.sharding, chunk.sharding))
    return jitted.lower(group.k_pages, group.v_pages, page_ids)


def lower_write(group: CacheGroup, num_pages: int, sharder: Sharder) -> jax.stages.Lowered:
    """Lower `write_pages` for a group of shapes, which is donated."""
    chunk, page_ids = _abstract_chunk(group, num_pages, sharder)
    shardings = (group.k_pages.sharding, group.v_pages.sharding)
    jitted = jax.jit(write_pages, donate_argnums=(0, 1), out_shardings=shardings)
    return jitted.lower(group.k_pages, group.v_pages, page_ids, chunk, chunk)


def _abstract_chunk(
    group: CacheGroup, num_pages: int, sharder: Sharder
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The keys or values of N pages, and their ids."""
    num_layers, _, *page_shape = group.k_pages.shape
    shape = (num_pages, num_layers, *page_shape)
    chunk = sharder.abstract(shape, group.k_pages.dtype, CHUNK_AXES)
    return chunk, sharder.replicated((num_pages,), "int32")
