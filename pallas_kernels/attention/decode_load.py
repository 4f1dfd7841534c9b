"""The loading warpgroup of the decode kernel: its warps fetch queries and pages ahead."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_block import Segment, Shared, Sizes, steps_of, visible_start
from pallas_kernels.attention.page_warps import (
    QUERY_WARP,
    PageTiles,
    keys_and_values,
    page_places,
)


def load_segments(
    sizes: Sizes,
    shared: Shared,
    inputs: tuple[Any, Any, Any, Any, Any],
    segments: Any,
    *,
    head: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    first: Segment,
) -> None:
    """Fetch all that the workers attend, in their order, as fast as the rings take it.

    One thread that issues the copies of 16-token pages one by one would hold everybody up, so the
    four warps share them.

    Args:
      sizes: static numbers.
      shared: memory and barriers.
      inputs: queries, k_pages, v_pages, page_table and layer in global memory.
      segments: [R, 7] in global memory.
      head: KV head.
      begin: of this thread block's segments.
      end: of this thread block's segments.
      first: its first segment.
    """
    queries_ref, k_ref, v_ref, table_ref, layer_ref = inputs
    layer = layer_ref[0]

    def load(warp):
        rings = keys_and_values(shared, (k_ref, v_ref), sizes.copies, warp)

        def load_segment(index, carry):
            positions, turn, segment = carry
            following = read_segment(segments, jnp.minimum(index + 1, end - 1))

            @pl.when(segment.steps > 0)
            def _fetch():
                row = (segment.row * sizes.num_kv_heads + head) * sizes.rows_a_group
                source = queries_ref.at[pl.ds(row, sizes.columns)]
                _fetch_queries(shared, source, turn, warp)
                _fetch_tiles(sizes, rings, (layer, head), table_ref, segment, positions, warp)

            positions = tuple(
                position + steps_of(sizes, segment.steps, worker)
                for worker, position in enumerate(positions)
            )
            return positions, turn + jnp.minimum(segment.steps, 1), following

        none = (jnp.int32(0),) * sizes.workers
        positions, turn, _ = lax.fori_loop(begin, end, load_segment, (none, jnp.int32(0), first))
        _drain(sizes, rings, shared.queries_free, positions, turn, warp)

    plgpu.warp_map(load)


def read_segment(segments: Any, index: jax.Array) -> Segment:
    """Segment `index` of the plan."""
    return Segment(*(segments[index, field] for field in range(len(Segment._fields))))


def _fetch_queries(shared: Shared, source: Any, turn: jax.Array, warp: jax.Array) -> None:
    place = lax.rem(turn, jnp.int32(2))

    @pl.when(warp == QUERY_WARP)
    def _fetch():
        @pl.when(turn >= 2)
        def _until_free():
            plgpu.barrier_wait(shared.queries_free.at[place])

        full = shared.queries_full.at[place]
        plgpu.copy_gmem_to_smem(source, shared.queries.at[place], full)


def _fetch_tiles(
    sizes: Sizes,
    rings: tuple[PageTiles, ...],
    source: tuple[jax.Array, jax.Array],
    table: Any,
    segment: Segment,
    positions: tuple[jax.Array, ...],
    warp: jax.Array,
) -> None:
    """Fetch this warp's pages of a segment, a block for each worker in turn."""
    layer, head = source
    page_size, workers = jnp.int32(sizes.page_size), sizes.workers
    first_page = lax.div(visible_start(sizes, segment), page_size)
    last_page = jnp.maximum(lax.div(segment.length - 1, page_size), first_page)
    places = page_places(sizes.copies, warp)

    def page_ids(index):
        ids = []
        for worker in range(workers):
            key = (segment.first + index * workers + worker) * sizes.block
            page = lax.div(key, page_size)
            pages = (jnp.clip(page + place, first_page, last_page) for place in places)
            ids.append([table[segment.row, page] for page in pages])
        return ids

    def fetch(ring, worker, index, ids):
        tile = worker * sizes.stages + lax.rem(positions[worker] + index, jnp.int32(sizes.stages))

        @pl.when(positions[worker] + index >= sizes.stages)
        def _until_free():
            plgpu.barrier_wait(ring.free.at[tile])

        for place, page in zip(places, ids, strict=True):
            if sizes.page_size <= sizes.block:
                rows = pl.ds(place * sizes.page_size, sizes.page_size)
                pages, target = ring.pages.at[layer, page, :, head], ring.tiles.at[tile, rows]
            else:
                key = (segment.first + index * workers + worker) * sizes.block
                rows = pl.ds(lax.rem(key, page_size), sizes.block)
                pages, target = ring.pages.at[layer, page, rows, head], ring.tiles.at[tile]
            plgpu.copy_gmem_to_smem(pages, target, ring.full.at[tile])

    def fetch_blocks(index, ids):
        following = page_ids(index + 1)  # read early: its latency passes behind the waits
        for worker in range(workers):
            for ring in rings:
                is_needed = index * workers + worker < segment.steps
                needed = pl.when(is_needed & ring.is_mine)
                needed(functools.partial(fetch, ring, worker, index, ids[worker]))
        return following

    rounds = lax.div(segment.steps + (workers - 1), jnp.int32(workers))
    lax.fori_loop(0, rounds, fetch_blocks, page_ids(jnp.int32(0)))


def _drain(
    sizes: Sizes,
    rings: tuple[PageTiles, ...],
    queries_free: Any,
    positions: tuple[jax.Array, ...],
    turn: jax.Array,
    warp: jax.Array,
) -> None:
    """Wait until all is consumed, so that no barrier dies in use."""

    @pl.when(warp == QUERY_WARP)
    def _drain_queries():
        @pl.loop(jnp.maximum(turn - 2, 0), turn)
        def _wait(turn):
            plgpu.barrier_wait(queries_free.at[lax.rem(turn, jnp.int32(2))])

    for ring in rings:
        for worker, position in enumerate(positions):

            @pl.when(ring.is_mine)
            def _drain_ring(ring=ring, worker=worker, position=position):
                @pl.loop(jnp.maximum(position - sizes.stages, 0), position)
                def _wait(tile):
                    place = worker * sizes.stages + lax.rem(tile, jnp.int32(sizes.stages))
                    plgpu.barrier_wait(ring.free.at[place])
