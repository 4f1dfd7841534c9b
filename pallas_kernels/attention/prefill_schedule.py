"""The online softmax of one query tile in the prefill kernel, by one of two schedules.

In turn: a block's logits, softmax and values follow each other, and two warpgroups take turns:
one multiplies while the other takes its softmax. Overlapped: a warpgroup multiplies the values of
a block while it takes the softmax of the next one; it can take turns too.

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
    turns: Any  # barriers of the turns, or None


def turns_scratch(tuning: PrefillTuningConfig) -> Any:
    """Barriers by which two computing warpgroups take turns."""
    if not tuning.ping_pong:
        return None
    if tuning.overlap:
        return plgpu.Barrier(num_barriers=tuning.compute_warpgroups)
    return plgpu.Barrier(num_arrivals=tuning.compute_warpgroups)


def begin_turns(tuning: PrefillTuningConfig, turns: Any, warpgroup: jax.Array) -> None:
    """Put warpgroup 1 half a block behind warpgroup 0; once, before the first tile."""
    if tuning.ping_pong:
        act = _pass_turn if tuning.overlap else _meet
        pl.when(warpgroup == 1)(lambda: act(turns))


def end_turns(tuning: PrefillTuningConfig, turns: Any, warpgroup: jax.Array) -> None:
    """Let warpgroup 1 catch up; once, after the last tile."""
    if tuning.ping_pong:
        act = _take_turn if tuning.overlap else _meet
        pl.when(warpgroup == 0)(lambda: act(turns))


def attend(
    plan: BlockPlan, tuning: PrefillTuningConfig, tile: Tile, span: Span, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attend 64 query rows to their blocks.

    Args:
      plan: static numbers.
      tuning: says which schedule.
      tile: queries and the ring of K and V.
      span: which blocks, at least one.
      position: tiles that went through the ring before.

    Returns:
      Weighted values [64, H] and sum of weights [64], float32.
    """
    run = _attend_overlapped if tuning.overlap else _attend_in_turn
    return run(plan, tile, span, position)


def skip(
    plan: BlockPlan, tuning: PrefillTuningConfig, tile: Tile, steps: jax.Array, position: jax.Array
) -> None:
    """Let the blocks of a tile pass, for a warpgroup without queries in it."""
    ring = tile.ring

    @pl.loop(0, steps)
    def _pass(step):
        slot = _slot(plan, position + step)
        plgpu.barrier_wait(ring.k_full.at[slot])
        plgpu.barrier_arrive(ring.k_free.at[slot])
        if tuning.ping_pong:
            for act in (_take_turn, _pass_turn) if tuning.overlap else (_meet, _meet):
                act(tile.turns)
        plgpu.barrier_wait(ring.v_full.at[slot])
        plgpu.barrier_arrive(ring.v_free.at[slot])


def _attend_in_turn(plan: BlockPlan, tile: Tile, span: Span, position):
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
            zero_values_outside(plan, ring.v.at[slot], *_columns(plan, span, step))
        if turns is not None:
            plgpu.barrier_wait(turns)  # the other one has issued its products
        acc = add_values(plan, acc, p, tile.weights, ring.v.at[slot])
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return acc, highest, total

    acc, _, total = _for_each_block(plan, span, attend_block, jnp.int32(0), empty_sums(plan))
    return acc, total


def _attend_overlapped(plan: BlockPlan, tile: Tile, span: Span, position):
    ring, turns = tile.ring, tile.turns

    def clean(is_edge: bool, step) -> None:
        """Make the values of a block ready for its weights."""
        if is_edge:
            slot = _slot(plan, position + step)
            zero_values_outside(plan, ring.v.at[slot], *_columns(plan, span, step))

    def attend_first(acc, highest, total):
        slot = _slot(plan, position)
        plgpu.barrier_wait(ring.k_full.at[slot])
        if turns is not None:
            _take_turn(turns)

        def multiply_keys(product):
            plgpu.wgmma(product, tile.queries, ring.k.at[slot].transpose((1, 0)))
            if turns is not None:
                _pass_turn(turns)
            return product[...]

        products = pl.run_scoped(multiply_keys, _logits_ref(plan))
        plgpu.barrier_arrive(ring.k_free.at[slot])
        visible = _visible(plan, span, jnp.int32(0))
        highest, total, p, _ = _softmax(plan, products, highest, total, visible)
        plgpu.barrier_wait(ring.v_full.at[slot])
        clean(True, jnp.int32(0))
        return acc, highest, total, p.astype(plan.dtype)

    def attend_block(is_edge: bool, step, carry):
        slot = _slot(plan, position + step)
        plgpu.barrier_wait(ring.k_full.at[slot])
        if turns is not None:
            _take_turn(turns)
        visible = _visible(plan, span, step) if is_edge else None
        last = _slot(plan, position + step - 1)
        acc, highest, total, p, shrink = _overlap(plan, tile, carry, slot, last, visible)
        plgpu.barrier_arrive(ring.v_free.at[last])
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        p = p.astype(plan.dtype)
        clean(is_edge, step)
        return acc, highest, total, p

    carry = attend_first(*empty_sums(plan))
    acc, _, total, p = _for_each_block(plan, span, attend_block, jnp.int32(1), carry)
    last = _slot(plan, position + span.steps - 1)
    acc = add_values(plan, acc, p, tile.weights, ring.v.at[last])
    plgpu.barrier_arrive(ring.v_free.at[last])
    return acc, total


def _overlap(plan: BlockPlan, tile: Tile, carry, slot, last, visible: Visible | None):
    """Add the values of block `last` while the softmax of block `slot` is taken.

    The new weights stay float32: where operands of the next product are made while one is in
    flight, ptxas lets each product wait for the one before it (C7513).

    Args:
      plan: static numbers.
      tile: queries and ring.
      carry: sums without block `last`, and its weights p.
      slot: the new block's place in the ring.
      last: the place of the one before it.
      visible: mask of the new block; None = all.

    Returns:
      Weighted values with block `last`; highest logits and sums of weights with the new block,
      its weights in float32, and what shrinks the weighted values to the new highest logits.
    """
    acc, highest, total, p = carry
    ring = tile.ring

    def multiply_keys(product, acc_ref=None):
        plgpu.wgmma(product, tile.queries, ring.k.at[slot].transpose((1, 0)))
        if acc_ref is not None:
            plgpu.wgmma(acc_ref, p, ring.v.at[last])
        if tile.turns is not None:
            _pass_turn(tile.turns)
        return plgpu.wgmma_accumulator_load(product, wait_n=0 if acc_ref is None else 1)

    def attend(acc_ref=None):
        multiply = functools.partial(multiply_keys, acc_ref=acc_ref)
        products = pl.run_scoped(multiply, _logits_ref(plan))
        plgpu.barrier_arrive(ring.k_free.at[slot])
        softmax = _softmax(plan, products, highest, total, visible)
        # Between the softmax and the wait for the values of block `last`: ptxas would move that
        # wait ahead of the softmax, but not ahead of the loop that is in this one.
        plgpu.barrier_wait(ring.v_full.at[slot])
        return softmax

    if plan.p_in_smem:
        acc = add_values(plan, acc, p, tile.weights, ring.v.at[last])
        return acc, *attend()

    def attend_in_flight(refs):
        acc_ref, *results = refs
        for ref, result in zip(results, attend(acc_ref), strict=True):
            ref[...] = result

    no_weights = jnp.full((TILE_ROWS, plan.block), 0, jnp.float32)
    weights = plgpu.layout_cast(no_weights, plgpu.Layout.WGMMA)
    start = (plgpu.WGMMAAccumulatorRef.init(acc), highest, total, weights, highest)
    results: tuple[Any, ...] = pl.run_state(attend_in_flight)(start)
    return results


def _for_each_block(plan: BlockPlan, span: Span, attend_block, first: jax.Array, carry: Any) -> Any:
    """Run `attend_block(is_edge, step, carry)` for the blocks `[first, span.steps)`."""
    inner = jnp.maximum(span.inner, first)
    outer = jnp.maximum(span.outer, inner)
    edge = functools.partial(attend_block, True)
    if plan.window is not None:
        carry = lax.fori_loop(first, inner, edge, carry)
    carry = lax.fori_loop(inner, outer, functools.partial(attend_block, False), carry)
    return lax.fori_loop(outer, span.steps, edge, carry)


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
        products, factor = to_log2(plan, products), 1.0
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
        newest = query + shift  # of few values, which spares registers
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


def _take_turn(turns: Any) -> None:
    plgpu.barrier_wait(turns.at[lax.axis_index("wg")])


def _pass_turn(turns: Any) -> None:
    plgpu.barrier_arrive(turns.at[1 - lax.axis_index("wg")])
