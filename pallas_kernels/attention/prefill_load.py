"""The loading warpgroup of the prefill kernel: it fetches queries and pages ahead."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_attention import TILE_ROWS, TILED
from pallas_kernels.attention.page_warps import (
    QUERY_WARP,
    PageTiles,
    keys_and_values,
    page_places,
)
from pallas_kernels.attention.prefill_work import BlockPlan, Refs, Work, for_each_work, place_of

# Query tiles in shared memory: the next one is fetched early. With one alone, warpgroups that take
# turns would wait for ever: the later one's last turn needs the other's first of the next tile.
QUERY_BUFFERS = 2


class Ring(NamedTuple):
    """Tiles of K and V in shared memory [stages, block, H], and who may touch them."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


class Queries(NamedTuple):
    """Query tiles in shared memory [buffers, warpgroups, 64, H], and who may touch them."""

    tiles: Any
    full: Any
    free: Any


def ring_scratch(plan: BlockPlan, num_consumers: int) -> Ring:
    """Scratch of one ring of K and V tiles that `num_consumers` warpgroups read."""
    tile = plgpu.SMEM((plan.stages, plan.block, plan.head_dim), plan.dtype, transforms=TILED)
    full = plgpu.Barrier(num_arrivals=plan.copies, num_barriers=plan.stages)
    free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=plan.stages)
    return Ring(tile, tile, full, full, free, free)


class _Loader(NamedTuple):
    """What one warp fetches."""

    plan: BlockPlan
    refs: Refs
    queries: Queries
    tiles: tuple[PageTiles, PageTiles]
    places: list[jax.Array]  # of its pages in a block
    takes_queries: jax.Array


def load_all(plan: BlockPlan, refs: Refs, ring: Ring, queries: Queries) -> None:
    """Fetch the queries, keys and values of all items, as fast as the ring takes them.

    One thread that issues the copies of 16-token pages one by one would hold everybody up, so the
    four warps share them.
    """
    plgpu.warp_map(lambda warp: _load(_loader(plan, refs, ring, queries, warp)))


def _loader(plan: BlockPlan, refs: Refs, ring: Ring, queries: Queries, warp: jax.Array) -> _Loader:
    places = page_places(plan.copies, warp)
    tiles = keys_and_values(ring, (refs.k_pages, refs.v_pages), plan.copies, warp)
    return _Loader(plan, refs, queries, tiles, places, warp == QUERY_WARP)


def _load(loader: _Loader) -> None:
    plan = loader.plan

    def load(works: list[Work], index, position, ids):
        work, following = works
        pl.when(loader.takes_queries)(lambda: _fetch_queries(loader, work, index))

        def load_block(step, ids):
            # Read early, those of the next item too: the latency passes behind the waits.
            is_last = step + 1 == work.steps
            source = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), following, work)
            next_ids = _page_ids(loader, source, jnp.where(is_last, 0, step + 1))
            for tiles in loader.tiles:

                @pl.when(tiles.is_mine)
                def _fetch(tiles=tiles):
                    _fetch_pages(loader, tiles, work, step, position + step, ids)

            return next_ids

        return lax.fori_loop(0, work.steps, load_block, ids)

    mine, position = for_each_work(
        plan, loader.refs, load, begin=lambda work: _page_ids(loader, work, jnp.int32(0)), known=2
    )
    _drain(loader, mine, position)


def _fetch_queries(loader: _Loader, work: Work, index: jax.Array) -> None:
    queries, buffer = loader.queries, lax.rem(index, jnp.int32(QUERY_BUFFERS))
    pl.when(index >= QUERY_BUFFERS)(lambda: plgpu.barrier_wait(queries.free.at[buffer]))
    for warpgroup in range(queries.tiles.shape[1]):
        first_token, head = place_of(loader.plan, work, warpgroup)
        source = loader.refs.q.at[pl.ds(first_token, TILE_ROWS), head]
        target = queries.tiles.at[buffer, warpgroup]
        plgpu.copy_gmem_to_smem(source, target, queries.full.at[buffer])


def _page_ids(loader: _Loader, work: Work, step: jax.Array) -> list[jax.Array]:
    """Pages of one block; no table entry outside the keys that anyone sees is read."""
    first, last = _seen_pages(loader.plan, work)
    page = _first_page(loader.plan, work, step)
    pages = (jnp.clip(page + place, first, last) for place in loader.places)
    return [loader.refs.page_table[work.row, page] for page in pages]


def _fetch_pages(
    loader: _Loader, tiles: PageTiles, work: Work, step: jax.Array, position: jax.Array, ids
) -> None:
    """Fetch this warp's pages of one tile, once it is free.

    Pages that nobody sees are left out: their place in the tile holds anything.
    """
    plan = loader.plan
    slot, layer = lax.rem(position, jnp.int32(plan.stages)), loader.refs.layer[0]
    kv_head = lax.div(work.head, jnp.int32(plan.group))
    first, last = _seen_pages(plan, work)
    full = tiles.full.at[slot]
    pl.when(position >= plan.stages)(lambda: plgpu.barrier_wait(tiles.free.at[slot]))

    def copy(place, page):
        if plan.page_size <= plan.block:
            rows = pl.ds(place * plan.page_size, plan.page_size)
            source, target = tiles.pages.at[layer, page, :, kv_head], tiles.tiles.at[slot, rows]
        else:
            key = (work.first_block + step) * plan.block
            rows = pl.ds(lax.rem(key, jnp.int32(plan.page_size)), plan.block)
            source, target = tiles.pages.at[layer, page, rows, kv_head], tiles.tiles.at[slot]
        plgpu.copy_gmem_to_smem(source, target, full)

    for place, page in zip(loader.places, ids, strict=True):
        if plan.copies > 1:
            index = _first_page(plan, work, step) + place
            is_seen = (index >= first) & (index <= last)
            pl.when(is_seen)(lambda place=place, page=page: copy(place, page))
            pl.when(jnp.logical_not(is_seen))(lambda: plgpu.barrier_arrive(full))  # as a copy would
        else:
            copy(place, page)


def _first_page(plan: BlockPlan, work: Work, step: jax.Array) -> jax.Array:
    return lax.div((work.first_block + step) * plan.block, jnp.int32(plan.page_size))


def _seen_pages(plan: BlockPlan, work: Work) -> tuple[jax.Array, jax.Array]:
    """First and last page of the keys that anyone sees."""
    first = lax.div(work.keys[0], jnp.int32(plan.page_size))
    last = lax.div(work.keys[1] - 1, jnp.int32(plan.page_size))
    return first, jnp.maximum(last, first)


def _drain(loader: _Loader, mine: jax.Array, position: jax.Array) -> None:
    """Wait until all is consumed, so that no barrier dies in use."""
    stages, buffers = loader.plan.stages, QUERY_BUFFERS
    for tiles in loader.tiles:

        @pl.when(tiles.is_mine)
        def _drain_tiles(tiles=tiles):
            @pl.loop(jnp.maximum(position - stages, 0), position)
            def _wait(tile):
                plgpu.barrier_wait(tiles.free.at[lax.rem(tile, jnp.int32(stages))])

    @pl.when(loader.takes_queries)
    def _drain_queries():
        @pl.loop(jnp.maximum(mine - buffers, 0), mine)
        def _wait(index):
            plgpu.barrier_wait(loader.queries.free.at[lax.rem(index, jnp.int32(buffers))])
