"""The greedy head's kernel: a ring of hidden states and head, logits in registers, the best kept.

A thread block stays with its rows and makes one tile of columns after another. Its loading
warpgroup runs ahead through the ring; the two computing ones lie below each other, or side by side
where a tile has 64 rows. Of each eighth column of a row, the best logit so far stays in
registers from tile to tile; lanes meet once, at the end.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.mosaic_rows import divide, interpret_option
from pallas_kernels.products.greedy_head_plan import (
    BLOCK_K,
    COMPUTING,
    GROUP_ROWS,
    GreedyHeadPlan,
)
from pallas_kernels.products.ring import drain, multiply_steps
from pallas_kernels.products.wgmma_tiles import TILED

FOLD = 8  # columns of the best logits: what a slice of the WGMMA layout is a multiple of

_COMPUTE_REGISTERS, _LOAD_REGISTERS = 232, 40  # of a thread
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


class _Ring(NamedTuple):
    """Tiles of hidden states and head in shared memory, and who may touch them."""

    hidden: Any  # [stages, row_tile, BLOCK_K]; rows that S lacks are never written
    head: Any  # [stages, columns, BLOCK_K]
    full: Any
    free: Any


class _Best(NamedTuple):
    """The best so far of 64 rows, in each eighth column of the tiles."""

    logits: jax.Array  # float32[64, FOLD]; NaN where there was one
    starts: jax.Array  # int32[64, FOLD]; the logit's column, less its place among the FOLD


def launch(
    plan: GreedyHeadPlan, hidden: jax.Array, head: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Best logits float32[stored_rows, P] and their columns int32 of the same shape.

    Each of the P is the best of other columns, or of some that are counted twice.
    """
    shape = (plan.stored_rows, plan.partials)
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=COMPUTING + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
        ),
        **interpret_option(interpret),
    )
    logits, columns = run(hidden, head)
    return logits, columns


def _kernel(
    plan: GreedyHeadPlan, hidden_ref: Any, head_ref: Any, logits_ref: Any, columns_ref: Any
) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""

    def run(ring):
        @pl.when(lax.axis_index("wg") < COMPUTING)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _store(plan, _compute_tiles(plan, ring), logits_ref, columns_ref)

        @pl.when(lax.axis_index("wg") == COMPUTING)
        def _load():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            _load_tiles(plan, ring, hidden_ref, head_ref)

    stages = plan.stages
    ring = _Ring(
        hidden=plgpu.SMEM((stages, plan.row_tile, BLOCK_K), plan.dtype, transforms=TILED),
        head=plgpu.SMEM((stages, plan.columns, BLOCK_K), plan.dtype, transforms=TILED),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
    )
    pl.run_scoped(run, ring, collective_axes="wg")


def _share_and_row(plan: GreedyHeadPlan) -> tuple[jax.Array, jax.Array]:
    """Which share of the columns is this program's, and where its rows begin.

    Programs of the same columns follow each other, so that L2 holds the head for all of them.
    """
    share, row_tile = divide(lax.axis_index("program"), plan.row_tiles)
    # The last rows begin where they still fit; what is done twice has the same result.
    return share, jnp.minimum(row_tile * plan.row_tile, plan.rows - plan.tile_rows)


def _num_tiles(plan: GreedyHeadPlan, share: jax.Array) -> jax.Array:
    """Tiles of a share: every `sharers`-th one."""
    return lax.div(plan.column_tiles - share + (plan.sharers - 1), jnp.int32(plan.sharers))


def _first_column(plan: GreedyHeadPlan, share: jax.Array, index: jax.Array) -> jax.Array:
    """Where a share's tile begins; the last one of all ends with the head."""
    start = (share + index * plan.sharers) * plan.columns
    return jnp.minimum(start, plan.vocabulary - plan.columns)


def _load_tiles(plan: GreedyHeadPlan, ring: _Ring, hidden_ref: Any, head_ref: Any) -> None:
    """Fetch the hidden states and the head of all tiles, in order."""
    stages = jnp.int32(plan.stages)
    share, row = _share_and_row(plan)
    end = _num_tiles(plan, share) * plan.steps

    @pl.loop(0, end)
    def _fetch(position):
        index, step = divide(position, plan.steps)
        slot = lax.rem(position, stages)
        pl.when(position >= stages)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        depth = pl.ds(step * BLOCK_K, BLOCK_K)
        source = head_ref.at[pl.ds(_first_column(plan, share, index), plan.columns), depth]
        plgpu.copy_gmem_to_smem(source, ring.head.at[slot], ring.full.at[slot])
        source = hidden_ref.at[pl.ds(row, plan.tile_rows), depth]
        target = ring.hidden.at[slot, pl.ds(0, plan.tile_rows)]
        plgpu.copy_gmem_to_smem(source, target, ring.full.at[slot])

    drain(ring, jnp.maximum(end - stages, 0), end, stages)


def _compute_tiles(plan: GreedyHeadPlan, ring: _Ring) -> _Best:
    """The best of all tiles, in this warpgroup's rows and part of the columns."""
    share, _ = _share_and_row(plan)
    _, part = _place_in_tile(plan)

    def compute(index, best):
        start = _first_column(plan, share, index) + part * plan.own_columns
        return _better(best, _best_of(_multiply(plan, ring, index * plan.steps)), start)

    nothing = _Best(logits=_filled(-jnp.inf, jnp.float32), starts=_filled(0, jnp.int32))
    return lax.fori_loop(0, _num_tiles(plan, share), compute, nothing)


def _place_in_tile(plan: GreedyHeadPlan) -> tuple[jax.Array | int, jax.Array | int]:
    """Where this computing warpgroup's 64 rows begin, and its part of the columns."""
    warpgroup = lax.axis_index("wg")
    if plan.column_parts == 1:
        return warpgroup * GROUP_ROWS, 0
    return 0, warpgroup


def _multiply(plan: GreedyHeadPlan, ring: _Ring, position: jax.Array) -> jax.Array:
    """This warpgroup's logits float32[64, own_columns], from the ring's `position` on."""
    own_row, part = _place_in_tile(plan)
    rows = pl.ds(own_row, GROUP_ROWS)
    columns = pl.ds(part * plan.own_columns, plan.own_columns)

    def accumulate(sums):
        def multiply(slot):
            head = ring.head.at[slot, columns].transpose((1, 0))
            plgpu.wgmma(sums, ring.hidden.at[slot, rows], head)

        multiply_steps(ring, position, plan.steps, plan.stages, multiply)
        return sums[...]

    return pl.run_scoped(
        accumulate, plgpu.WGMMAAccumulatorRef((GROUP_ROWS, plan.own_columns), jnp.float32)
    )


def _best_of(logits: jax.Array) -> _Best:
    """The best of float32[64, N] in each eighth column, counted from the first one of the N."""
    best, starts = logits[:, :FOLD], _filled(0, jnp.int32)
    for start in range(FOLD, logits.shape[1], FOLD):
        others = logits[:, start : start + FOLD]
        starts = jnp.where(others > best, _filled(start, jnp.int32), starts)
        best = jnp.maximum(best, others)
    return _Best(best, starts)


def _filled(value: float, dtype: Any) -> jax.Array:
    """[64, FOLD] in registers."""
    return plgpu.layout_cast(jnp.full((GROUP_ROWS, FOLD), value, dtype), plgpu.Layout.WGMMA)


def _better(one: _Best, later: _Best, start: jax.Array) -> _Best:
    """The better of two, the first one of equals; those of `later` count from `start`."""
    starts = jnp.where(later.logits > one.logits, later.starts + start, one.starts)
    return _Best(jnp.maximum(one.logits, later.logits), starts)


def _store(plan: GreedyHeadPlan, best: _Best, logits_ref: Any, columns_ref: Any) -> None:
    """Store each row's best logit and its first column."""
    layout = plgpu.Layout.WGMMA
    highest = best.logits.max(1)
    over_fold = lax.broadcast_in_dim(highest, best.logits.shape, (0,))
    is_lower = best.logits < plgpu.layout_cast(over_fold, layout)
    columns = best.starts + plgpu.broadcasted_iota(jnp.int32, is_lower.shape, 1, layout=layout)
    lowest = jnp.where(is_lower, _filled(plan.vocabulary, jnp.int32), columns).min(1)
    share, row = _share_and_row(plan)
    own_row, part = _place_in_tile(plan)
    rows = pl.ds(row + own_row, GROUP_ROWS)
    partial = share * plan.column_parts + part
    logits_ref[rows, partial] = plgpu.layout_cast(highest, _BY_ROW)
    columns_ref[rows, partial] = plgpu.layout_cast(lowest, _BY_ROW)
