"""The online softmax of one query tile in the prefill kernel.

A block's logits, softmax and values follow each other. Two warpgroups can take turns: one
multiplies while the other takes its softmax. A turn is the values of one block and the logits of
the next, and ends with the tile: the other warpgroup does not wait for this one's output.

Source: Shah et al. 2024 (FlashAttention-3).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_attention import (
    LOG2_E,
    LOWEST,
    MASKED,
    TILE_ROWS,
    to_log2,
    zero_values_outside,
)
from pallas_kernels.attention.prefill_load import Ring
from pallas_kernels.attention.prefill_work import BlockPlan, Span

# (weighted values [64, H], highest logit [64], sum of weights [64]), all float32
Sums = tuple[jax.Array, jax.Array, jax.Array]
Visible = Callable[[jax.Array, jax.Array], jax.Array]


class Tile(NamedTuple):
    """What a warpgroup computes with."""

    ring: Ring
    queries: Any  # [64, H] in shared memory
    queries_free: Any  # barrier
    weights: Any  # [64, block] in shared memory where `plan.p_in_smem`
    turns: Any  # barrier of the turns, or None


def begin_turns(turns: Any, warpgroup: jax.Array) -> None:
    """Put warpgroup 1 half a block behind warpgroup 0; once, before the first tile."""
    if turns is not None:
        pl.when(warpgroup == 1)(lambda: _meet(turns))
        plgpu.barrier_arrive(turns)  # as at the end of a tile


def end_turns(turns: Any, warpgroup: jax.Array) -> None:
    """Let warpgroup 1 catch up; once, after the last tile."""
    if turns is not None:
        plgpu.barrier_wait(turns)
        pl.when(warpgroup == 0)(lambda: _meet(turns))


def attend(
    plan: BlockPlan, tile: Tile, span: Span, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attend 64 query rows to their blocks.

    Args:
      plan: static numbers.
      tile: queries and the ring of K and V.
      span: which blocks, at least one.
      position: tiles that went through the ring before.

    Returns:
      Weighted values [64, H] and sum of weights [64], float32.
    """
    ring, turns = tile.ring, tile.turns

    def attend_block(width: int, is_edge: bool, step, sums):
        acc, highest, total = sums
        slot = _slot(plan, position + step)
        keys, values = (tiles.at[slot, pl.ds(0, width)] for tiles in (ring.k, ring.v))
        plgpu.barrier_wait(ring.k_full.at[slot])

        def multiply_keys(product):
            plgpu.wgmma(product, tile.queries, keys.transpose((1, 0)))
            _begin_softmax(turns, step)
            return product[...]

        products = pl.run_scoped(multiply_keys, _logits_ref(width))
        plgpu.barrier_arrive(ring.k_free.at[slot])
        plgpu.barrier_arrive(tile.queries_free, predicate=step + 1 == span.steps)
        visible = _visible(plan, span, step) if is_edge else None
        highest, total, p, shrink = _softmax(plan, products, highest, total, visible)
        p = p.astype(plan.dtype)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        acc, highest, total, p = _end_softmax(turns, (acc, highest, total, p))
        plgpu.barrier_wait(ring.v_full.at[slot])
        if is_edge:
            zero_values_outside(values, *_columns(plan, span, step))
        if turns is not None:
            plgpu.barrier_wait(turns)  # the other one has issued its products
        weights = None if tile.weights is None else tile.weights.at[:, pl.ds(0, width)]
        acc = _add_values(plan, acc, p, weights, values)
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return acc, highest, total

    acc, _, total = _for_each_block(plan, span, attend_block, _empty_sums(plan))
    _end_turn(turns)
    return acc, total


def skip(plan: BlockPlan, tile: Tile, steps: jax.Array, position: jax.Array) -> None:
    """Let the blocks of a tile pass, for a warpgroup without queries in it."""
    ring = tile.ring

    @pl.loop(0, steps)
    def _pass(step):
        slot = _slot(plan, position + step)
        plgpu.barrier_wait(ring.k_full.at[slot])
        plgpu.barrier_arrive(ring.k_free.at[slot])
        if tile.turns is not None:
            _begin_softmax(tile.turns, step)
            _meet(tile.turns)
        plgpu.barrier_wait(ring.v_full.at[slot])
        plgpu.barrier_arrive(ring.v_free.at[slot])

    plgpu.barrier_arrive(tile.queries_free)
    _end_turn(tile.turns)


def _begin_softmax(turns: Any, step: jax.Array) -> None:
    """Let the other warpgroup multiply its values, and wait until its softmax is behind it.

    At a tile's first block it was let by `_end_turn` of the tile before.
    """
    if turns is not None:
        plgpu.barrier_arrive(turns, predicate=step > 0)
        plgpu.barrier_wait(turns)


def _end_softmax(turns: Any, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Let the other warpgroup take its softmax, once `values` are computed."""
    if turns is not None:
        values = lax.optimization_barrier(values)  # they must not sink below the arrival
        plgpu.barrier_arrive(turns)
    return values


def _end_turn(turns: Any) -> None:
    """Let the other warpgroup multiply after this one's last block of a tile."""
    if turns is not None:
        plgpu.barrier_arrive(turns)


def _for_each_block(
    plan: BlockPlan, span: Span, attend_block: Callable[..., Sums], sums: Sums
) -> Sums:
    """Run `sums = attend_block(width, is_edge, step, sums)` for the blocks `[0, span.steps)`."""
    edge = functools.partial(attend_block, plan.block, True)
    inner = functools.partial(attend_block, plan.block, False)
    if plan.window is not None:
        sums = lax.fori_loop(0, span.inner, edge, sums)
    sums = lax.fori_loop(span.inner, span.outer, inner, sums)
    sums = lax.fori_loop(span.outer, span.halves, edge, sums)
    if not plan.halves_blocks:
        return sums
    half = functools.partial(attend_block, TILE_ROWS, True)
    return lax.fori_loop(span.halves, span.steps, half, sums)


def _empty_sums(plan: BlockPlan) -> Sums:
    """The sums before the first block."""
    shape, by_row = (TILE_ROWS, plan.head_dim), plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((TILE_ROWS,), LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), by_row),
    )


def _softmax(
    plan: BlockPlan, products: jax.Array, highest, total, visible: Visible | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One block of the online softmax, in base 2.

    The factor of the logits is applied with the subtraction of the highest, by one instruction.

    Returns:
      Highest logits [64], sums of weights [64], weights [64, block], and
      2 ** (old highest - new highest) [64], all float32.
    """
    factor = plan.scale * LOG2_E
    if plan.soft_cap is not None:
        products, factor = to_log2(products, plan.scale, plan.soft_cap), 1.0
    shape = products.shape
    if visible is not None:
        iotas = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        products = jnp.where(visible(*iotas), products, MASKED)
    new_highest = jnp.maximum(highest, products.max(axis=1) * factor)
    shrink = jnp.exp2(highest - new_highest)
    p = jnp.exp2(products * factor - lax.broadcast_in_dim(new_highest, shape, [0]))
    return new_highest, total * shrink + p.sum(axis=1), p, shrink


def _add_values(plan: BlockPlan, acc: jax.Array, p: jax.Array, weights: Any, values: Any) -> Any:
    """Compute acc + p @ values."""
    if not plan.p_in_smem:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))(
            plgpu.WGMMAAccumulatorRef.init(acc)
        )

    def multiply_values(product):
        weights[...] = p
        plgpu.commit_smem()
        plgpu.wgmma(product, weights, values)
        return product[...]

    shape = (TILE_ROWS, plan.head_dim)
    return acc + pl.run_scoped(multiply_values, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _visible(plan: BlockPlan, span: Span, step: jax.Array) -> Visible:
    """Which pairs (query row, key column) of a block count."""
    shift = span.base - (span.first_block + step) * plan.block

    def visible(query, column):
        # Of few values, which spares registers.
        newest = shift if plan.is_one_position else query + shift
        seen = column <= newest
        return seen if plan.window is None else seen & (column > newest - plan.window)

    return visible


def _columns(plan: BlockPlan, span: Span, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns `[first, end)` of a block that any query of the tile sees."""
    offset = (span.first_block + step) * plan.block
    return span.keys[0] - offset, span.keys[1] - offset


def _logits_ref(width: int) -> Any:
    return plgpu.WGMMAAccumulatorRef((TILE_ROWS, width), jnp.float32)


def _slot(plan: BlockPlan, position: jax.Array) -> jax.Array:
    return lax.rem(position, jnp.int32(plan.stages))


def _meet(turns: Any) -> None:
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)
