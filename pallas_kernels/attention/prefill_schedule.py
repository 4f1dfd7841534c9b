"""The online softmax of one query tile in the prefill kernel.

A block's logits, softmax and values follow each other. Two warpgroups can take turns: one
multiplies while the other takes its softmax.

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
    MASKED,
    TILE_ROWS,
    BlockPlan,
    Ring,
    Sums,
    add_values,
    empty_sums,
    to_log2,
    zero_values_outside,
)
from pallas_kernels.attention.prefill_work import Span
from pallas_kernels.attention.tuning import PrefillTuningConfig

Visible = Callable[[jax.Array, jax.Array], jax.Array]


class Tile(NamedTuple):
    """What a warpgroup computes with."""

    ring: Ring
    queries: Any  # [64, H] in shared memory
    weights: Any  # [64, block] in shared memory where `plan.p_in_smem`
    turns: Any  # barrier of the turns, or None


def turns_scratch(tuning: PrefillTuningConfig) -> Any:
    """The barrier by which two computing warpgroups take turns, if they do."""
    return plgpu.Barrier(num_arrivals=2) if tuning.ping_pong else None


def begin_turns(tuning: PrefillTuningConfig, turns: Any, warpgroup: jax.Array) -> None:
    """Put warpgroup 1 half a block behind warpgroup 0; once, before the first tile."""
    if tuning.ping_pong:
        pl.when(warpgroup == 1)(lambda: _meet(turns))


def end_turns(tuning: PrefillTuningConfig, turns: Any, warpgroup: jax.Array) -> None:
    """Let warpgroup 1 catch up; once, after the last tile."""
    if tuning.ping_pong:
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

    def attend_block(is_edge: bool, step, sums):
        acc, highest, total = sums
        slot = _slot(plan, position + step)
        plgpu.barrier_wait(ring.k_full.at[slot])

        def multiply_keys(product):
            plgpu.wgmma(product, tile.queries, ring.k.at[slot].transpose((1, 0)))
            if turns is not None:
                _meet(turns)  # the other one has its softmax behind it
            return product[...]

        products = pl.run_scoped(multiply_keys, _logits_ref(plan))
        plgpu.barrier_arrive(ring.k_free.at[slot])
        visible = _visible(plan, span, step) if is_edge else None
        highest, total, p, shrink = _softmax(plan, products, highest, total, visible)
        p = p.astype(plan.dtype)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        if turns is not None:
            # The softmax must not sink below the barrier.
            acc, highest, total, p = lax.optimization_barrier((acc, highest, total, p))
            plgpu.barrier_arrive(turns)
        plgpu.barrier_wait(ring.v_full.at[slot])
        if is_edge:
            zero_values_outside(ring.v.at[slot], *_columns(plan, span, step))
        if turns is not None:
            plgpu.barrier_wait(turns)  # the other one has issued its products
        acc = add_values(plan, acc, p, tile.weights, ring.v.at[slot])
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return acc, highest, total

    acc, _, total = _for_each_block(plan, span, attend_block, empty_sums(plan))
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
            _meet(tile.turns)
            _meet(tile.turns)
        plgpu.barrier_wait(ring.v_full.at[slot])
        plgpu.barrier_arrive(ring.v_free.at[slot])


def _for_each_block(plan: BlockPlan, span: Span, attend_block, sums: Sums) -> Sums:
    """Run `attend_block(is_edge, step, sums)` for the blocks `[0, span.steps)`."""
    edge = functools.partial(attend_block, True)
    if plan.window is not None:
        sums = lax.fori_loop(0, span.inner, edge, sums)
    sums = lax.fori_loop(span.inner, span.outer, functools.partial(attend_block, False), sums)
    return lax.fori_loop(span.outer, span.steps, edge, sums)


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


def _logits_ref(plan: BlockPlan) -> Any:
    return plgpu.WGMMAAccumulatorRef((TILE_ROWS, plan.block), jnp.float32)


def _slot(plan: BlockPlan, position: jax.Array) -> jax.Array:
    return lax.rem(position, jnp.int32(plan.stages))


def _meet(turns: Any) -> None:
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)
