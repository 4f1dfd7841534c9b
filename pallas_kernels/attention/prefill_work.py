"""Work of the prefill kernel: which program does what, and which blocks a tile attends to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.mosaic_attention import TILE_ROWS, BlockPlan


class Refs(NamedTuple):
    """Arrays in global memory."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    layer: Any
    tiles: Any
    counts: Any
    decoded: Any  # or None
    out: Any


class Work(NamedTuple):
    """One query head's share of one query tile, int32 scalars.

    Tokens count along [T, ...], positions and keys along the sequence.
    """

    head: jax.Array
    row: jax.Array
    first_token: jax.Array  # of place 0 of the tile, aligned
    tokens: tuple[jax.Array, jax.Array]  # [first, end) with queries of this row
    base: jax.Array  # position of place 0, negative where that is another row's; or of all places
    keys: tuple[jax.Array, jax.Array]  # [first, end) that any query sees
    first_block: jax.Array
    steps: jax.Array


class Span(NamedTuple):
    """The blocks that 64 query rows attend to, int32 scalars.

    Blocks `[inner, outer)` are seen whole by every query; the others need masks.
    """

    first_block: jax.Array
    steps: jax.Array
    inner: jax.Array
    outer: jax.Array
    keys: tuple[jax.Array, jax.Array]  # [first, end) that any query of the tile sees
    base: jax.Array  # position of query row 0, or of all


def for_each_work(
    plan: BlockPlan, refs: Refs, do: Callable[[Work, jax.Array, jax.Array], None]
) -> tuple[jax.Array, jax.Array]:
    """Call `do(work, index, position)` for this program's items; position = K tiles before it.

    Every warpgroup walks the same items, those with most keys first. Every second round goes
    through the programs backwards, so that each program gets as much work. The next item's
    numbers are read before this one is done.

    Returns:
      Number of items and of K tiles.
    """
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    max_tiles, num_heads = refs.tiles.shape[0], refs.q.shape[1]
    items = refs.counts[0] * num_heads
    rounds = lax.div(items + (programs - 1), jnp.int32(programs))

    def item(index):
        backwards = lax.rem(index, jnp.int32(2)) == 1
        return index * programs + jnp.where(backwards, programs - 1 - program, program)

    def read(index):
        tile = jnp.minimum(lax.div(item(index), jnp.int32(num_heads)), max_tiles - 1)
        return tuple(refs.tiles[tile, field] for field in range(5))

    def step(index, carry):
        position, fields = carry
        next_fields = read(index + 1)
        work = _describe(plan, lax.rem(item(index), jnp.int32(num_heads)), fields)
        do(work, index, position)
        return position + work.steps, next_fields

    mine = rounds - (item(rounds - 1) >= items).astype(jnp.int32)
    position, _ = lax.fori_loop(0, mine, step, (jnp.int32(0), read(jnp.int32(0))))
    return mine, position


def _describe(plan: BlockPlan, head: jax.Array, fields: tuple[jax.Array, ...]) -> Work:
    row, first_token, first, end, base = fields
    oldest, end_key = base + (first - first_token), base + (end - first_token)
    if plan.is_one_position:
        oldest, end_key = base, base + 1
    first_key = jnp.int32(0)
    if plan.window is not None:
        first_key = jnp.maximum(oldest - plan.window + 1, 0)
    block = jnp.int32(plan.block)
    first_block = lax.div(first_key, block)
    steps = jnp.maximum(lax.div(end_key + (block - 1), block) - first_block, 1)
    keys = (first_key, end_key)
    return Work(head, row, first_token, (first, end), base, keys, first_block, steps)


def span_of(plan: BlockPlan, work: Work, warpgroup: jax.Array) -> Span:
    """The blocks of a work, and which of them every query sees whole."""
    block = jnp.int32(plan.block)
    inner = jnp.int32(0)
    if plan.window is not None:
        seen_by_all = jnp.maximum(work.keys[1] - plan.window, 0)
        inner = lax.div(seen_by_all + (block - 1), block) - work.first_block
        inner = jnp.clip(inner, 0, work.steps)
    base, first_position = work.base, work.base
    if not plan.is_one_position:
        first_position += work.tokens[0] - work.first_token
        base += warpgroup * TILE_ROWS
    outer = jnp.clip(lax.div(first_position + 1, block) - work.first_block, inner, work.steps)
    return Span(work.first_block, work.steps, inner, outer, work.keys, base)
