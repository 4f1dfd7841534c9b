"""The one-row kernel as one thread block runs it: what it loads, when, and what it makes of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.one_row_block import (
    Sizes,
    State,
    Tile,
    attend_tile,
    begin,
    empty_tile,
    find_span,
    first_key,
    load_queries,
    load_tile,
    read_pages,
)
from pallas_kernels.attention.one_row_inline import only_if, read_now, synchronize
from pallas_kernels.attention.one_row_inputs import (
    Inputs,
    Loaded,
    Share,
    load_new,
    load_query_heads,
    make_queries,
    nothing_new,
    write_key_and_value,
)
from pallas_kernels.attention.one_row_meeting import (
    Shared,
    finish,
    load_cluster,
    meet_in_block,
    meet_in_cluster,
)
from pallas_kernels.fused.rotary_heads import RotaryInputs

AHEAD = 2
"""Tiles that a block loads ahead, into registers."""


def run_block(sizes: Sizes, present: tuple[bool, bool], *refs: Any) -> None:
    """The kernel.

    Args:
      sizes: static numbers.
      present: whether there is a bias, and whether there are gains.
      refs: those of `RotaryInputs`; then page table, lengths, counters, the pages, the outputs and
        shared memory.
    """
    has_bias, has_gains = present
    rotary, others = RotaryInputs.take(refs, has_bias=has_bias, has_gains=has_gains)
    table, lens, counters, k_pages, v_pages, out, accs, numbers, shared = others
    inputs = Inputs(rotary, table, lens, (k_pages, v_pages))
    _attend(sizes, inputs, shared, (out, accs, numbers, counters))


def _attend(sizes: Sizes, inputs: Inputs, shared: Shared, outputs: tuple[Any, ...]) -> None:
    """Make the queries, attend this block's share of a row's KV head, and meet the others."""
    row, head, cluster = (lax.axis_index(name) for name in ("row", "head", "cluster"))
    block = lax.axis_index("block") if sizes.blocks > 1 else jnp.int32(0)
    number = cluster * sizes.blocks + block
    length, cache_layer = (
        read_now(scalar, interpreted=sizes.interpreted)
        for scalar in (inputs.lens.at[row], inputs.rotary.cache_layer.at[0])
    )
    share = Share(row, head, number, cache_layer, find_span(sizes, length))
    pages = [_read_pages(sizes, inputs, share, turn) for turn in range(AHEAD)]
    queries = [load_query_heads(sizes, inputs, row, head, chunk) for chunk in sizes.chunks]
    first = _load_first(sizes, inputs, share, pages)

    def work():
        states = _attend_share(sizes, inputs, shared, share, queries, *first)
        parts = meet_in_block(sizes, shared, states)
        ends = tuple(ref.at[row, head] for ref in outputs)
        if sizes.blocks == 1:
            finish(sizes, shared, parts, share.span.clusters, ends)
            return
        meet_in_cluster(sizes, shared, parts)

        @pl.when(block == 0)
        def _lead():
            finish(sizes, shared, load_cluster(sizes, shared), share.span.clusters, ends)

    only_if(cluster < share.span.clusters, work, interpreted=sizes.interpreted)


def _read_pages(
    sizes: Sizes, inputs: Inputs, share: Share, turn: jax.Array | int
) -> list[jax.Array]:
    """Pages of the tile that the block attends at its turn."""
    return read_pages(sizes, inputs.table, share.row, share.span, _tile_at(sizes, share, turn))


def _tile_at(sizes: Sizes, share: Share, turn: jax.Array | int) -> jax.Array:
    """Number in the span of the tile of a turn: the blocks of all working clusters alternate."""
    return share.number + turn * share.span.clusters * sizes.blocks


def _load_first(
    sizes: Sizes, inputs: Inputs, share: Share, pages: list[list[jax.Array]]
) -> tuple[list[Tile], Loaded]:
    """The block's first tiles, and the new key and value where they are its own.

    One branch for all: the compiler reads the page table before it, since most sides need it, and
    so while the queries are on the way. The block with the new token may load the null page.
    """

    def load_some(count):
        tiles = [_load_tile(sizes, inputs, share, turn, pages[turn]) for turn in range(count)]
        return tiles + [empty_tile(sizes)] * (AHEAD - count)

    def load_others(count):
        return load_some(count), nothing_new(sizes, inputs)

    span = share.span
    works = share.number < span.clusters * sizes.blocks
    has_tile = [works & (_tile_at(sizes, share, turn) < span.tiles) for turn in range(AHEAD)]
    turns = functools.reduce(jnp.add, [has.astype(jnp.int32) for has in has_tile])
    return lax.switch(
        jnp.where(share.number == 0, AHEAD + 1, turns),
        [
            *(functools.partial(load_others, count) for count in range(AHEAD + 1)),
            lambda: (load_some(AHEAD), load_new(sizes, inputs, share.row, share.head)),
        ],
    )


def _load_tile(
    sizes: Sizes,
    inputs: Inputs,
    share: Share,
    turn: jax.Array | int,
    pages: list[jax.Array],
) -> Tile:
    first = first_key(sizes, share.span, _tile_at(sizes, share, turn))
    return load_tile(sizes, inputs.pages, (share.cache_layer, share.head), pages, first)


def _attend_share(
    sizes: Sizes,
    inputs: Inputs,
    shared: Shared,
    share: Share,
    loaded: list[Loaded],
    tiles: list[Tile],
    new: Loaded,
) -> list[State]:
    """The softmax of each query head over this block's tiles."""
    make_queries(sizes, shared.queries, loaded)

    @pl.when(share.number == 0)
    def _write_new():
        write_key_and_value(sizes, inputs, shared.new, share, new)

    synchronize(interpreted=sizes.interpreted)
    queries = load_queries(sizes, shared.queries)
    is_owner = (share.number == 0) & (share.span.end >= 0)
    states = begin(sizes, queries, shared.new, is_owner)
    return _attend_tiles(sizes, inputs, share, queries, tiles, states)


def _attend_tiles(
    sizes: Sizes,
    inputs: Inputs,
    share: Share,
    queries: list[jax.Array],
    tiles: list[Tile],
    states: list[State],
) -> list[State]:
    """Turn after turn, each with the tile that was loaded `AHEAD` turns before."""
    span = share.span
    stride = span.clusters * sizes.blocks
    turns = lax.div(jnp.maximum(span.tiles - share.number, 0) + (stride - 1), stride)

    def attend(turn, tile, states):
        pages = _read_pages(sizes, inputs, share, turn + AHEAD)
        first = first_key(sizes, span, _tile_at(sizes, share, turn))
        states = attend_tile(sizes, queries, tile, first, span, states)
        following = lax.cond(
            _tile_at(sizes, share, turn + AHEAD) < span.tiles,
            lambda: _load_tile(sizes, inputs, share, turn + AHEAD, pages),
            lambda: tile,
        )
        return following, states

    def attend_some(index, carry):
        tiles, states = carry
        following = []
        for place, tile in enumerate(tiles):  # each stays in its registers
            turn = index * AHEAD + place
            run = functools.partial(attend, turn, tile)
            if place == 0:
                tile, states = run(states)
            else:
                tile, states = lax.cond(
                    turn < turns, run, lambda states, tile=tile: (tile, states), states
                )
            following.append(tile)
        return following, states

    rounds = lax.div(turns + (AHEAD - 1), jnp.int32(AHEAD))
    return lax.fori_loop(0, rounds, attend_some, (tiles, states))[1]
