"""The skinny product's kernel: a ring of weights, WGMMA with the weights on the left, sums out."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_inline import store_columns
from pallas_kernels.fused.mosaic_rows import interpret_option, layer_index
from pallas_kernels.products.kept_rows import WGMMA_ROWS, KeptRows, ProductPlan, Prologue
from pallas_kernels.products.product_schedule import TILE_COLUMNS
from pallas_kernels.products.ring import drain
from pallas_kernels.products.wgmma_tiles import TILED, TILED_FLOAT32


class _Ring(NamedTuple):
    """Tiles of weights in shared memory, of x too if it is not kept, and who may touch them."""

    weights: Any  # [stages, warpgroups, block_k, columns], transposed [..., columns, block_k]
    x: Any  # [stages, S, block_k], or None
    full: Any
    free: Any


class _Share(NamedTuple):
    """Numbers of the steps `[first, end)` of this program, int32 scalars."""

    first: jax.Array
    end: jax.Array


def launch(
    plan: ProductPlan,
    prologue: Prologue | None,
    arrays: Sequence[jax.Array],
    weights: jax.Array,
    layer: jax.Array,
    interpret: Any,
) -> list[jax.Array]:
    """Run the kernel.

    Args:
      plan: static numbers.
      prologue: makes x from `arrays`; None = `arrays` is x itself, which comes with the weights.
      arrays: what x is made of.
      weights: as `skinny_product` takes them.
      layer: int32[1].
      interpret: as `skinny_product` takes it.

    Returns:
      The sums float32[P, S, N], then the prologue's outputs.
    """
    schedule = plan.schedule
    sums = jax.ShapeDtypeStruct((schedule.partials, plan.rows, plan.columns), jnp.float32)
    run = plgpu.kernel(
        functools.partial(_kernel, plan, prologue, len(arrays)),
        out_type=[sums, *(() if prologue is None else prologue.outputs(plan))],
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=schedule.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
        ),
        **interpret_option(interpret),
    )
    return run(*arrays, weights, layer)


def _kernel(plan: ProductPlan, prologue: Prologue | None, num_arrays: int, *refs: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    arrays, (w_ref, layer_ref, out_ref, *outs) = refs[:num_arrays], refs[num_arrays:]
    schedule, computing = plan.schedule, plan.schedule.warpgroups

    def run(ring, staged, kept, ready, scratch):
        first = lax.axis_index("program") * schedule.share
        all_steps = schedule.tiles * schedule.steps
        share = _Share(first, jnp.minimum(first + schedule.share, all_steps))

        @pl.when(lax.axis_index("wg") < computing)
        def _compute():
            if prologue is None:
                x = None
                own_staged = staged.at[lax.axis_index("wg")]
            else:
                x, own_staged = KeptRows.of_share(plan, kept, share.first), None
                prologue.fill(plan, x, arrays, outs, scratch)
                plgpu.commit_smem()
                if ready is not None:
                    plgpu.barrier_arrive(ready)
                    plgpu.barrier_wait(ready)
            _compute_share(plan, ring, x, own_staged, share, out_ref)

        @pl.when(lax.axis_index("wg") == computing)
        def _load():
            x_ref = arrays[0] if prologue is None else None
            _load_share(plan, ring, share, x_ref, w_ref, layer_ref)

    pl.run_scoped(run, *_shared_memory(plan, prologue), collective_axes="wg")


def _shared_memory(plan: ProductPlan, prologue: Prologue | None) -> tuple[Any, ...]:
    """Ring, staged output, kept x, the barrier that says it is there, the prologue's own."""
    schedule = plan.schedule
    computing, stages = schedule.warpgroups, schedule.stages
    tile = (schedule.block_k, plan.group_columns)
    tile = tile[::-1] if plan.transposed else tile
    x_stage = (stages, plan.rows, schedule.block_k)
    is_kept = prologue is not None
    ring = _Ring(
        weights=plgpu.SMEM((stages, computing, *tile), plan.dtype, transforms=TILED),
        x=None if is_kept else plgpu.SMEM(x_stage, plan.dtype, transforms=TILED),
        full=plgpu.Barrier(num_arrivals=computing + (not is_kept), num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    )
    if not is_kept:
        staged = (computing, plan.rows, TILE_COLUMNS)
        return ring, plgpu.SMEM(staged, jnp.float32, transforms=TILED_FLOAT32), None, None, None
    kept_shape = (schedule.kept_steps, WGMMA_ROWS, schedule.block_k)
    kept = plgpu.SMEM(kept_shape, plan.dtype, transforms=TILED)
    ready = plgpu.Barrier(num_arrivals=computing) if computing > 1 else None
    return ring, None, kept, ready, prologue.scratch(plan)


def _first_column(plan: ProductPlan, tile: jax.Array) -> jax.Array:
    """Where a tile begins; the last one ends with the weight, so it may overlap its neighbour."""
    return jnp.minimum(tile * plan.schedule.block_n, plan.columns - plan.schedule.block_n)


def _load_share(
    plan: ProductPlan, ring: _Ring, share: _Share, x_ref: Any, w_ref: Any, layer_ref: Any
) -> None:
    """Fetch the steps of this program; the ring is first filled with weights, then with x."""
    schedule = plan.schedule
    stages, steps = jnp.int32(schedule.stages), jnp.int32(schedule.steps)
    layer = layer_index(layer_ref, w_ref)
    count = share.end - share.first
    filled = jnp.minimum(count, stages)

    def depth(index):
        return pl.ds(lax.rem(share.first + index, steps) * schedule.block_k, schedule.block_k)

    def fetch_weights(index, slot):
        start = _first_column(plan, lax.div(share.first + index, steps))
        for group in range(schedule.warpgroups):
            columns = pl.ds(start + group * plan.group_columns, plan.group_columns)
            place = (columns, depth(index)) if plan.transposed else (depth(index), columns)
            source, target = w_ref.at[(layer, *place)], ring.weights.at[slot, group]
            plgpu.copy_gmem_to_smem(source, target, ring.full.at[slot])

    def fetch_x(index, slot):
        plgpu.copy_gmem_to_smem(x_ref.at[:, depth(index)], ring.x.at[slot], ring.full.at[slot])

    @pl.loop(0, filled)
    def _fill_weights(index):
        fetch_weights(index, index)

    if x_ref is not None:

        @pl.loop(0, filled)
        def _fill_x(index):
            fetch_x(index, index)

    @pl.loop(filled, count)
    def _refill(index):
        slot = lax.rem(index, stages)
        plgpu.barrier_wait(ring.free.at[slot])
        fetch_weights(index, slot)
        if x_ref is not None:
            fetch_x(index, slot)

    drain(ring, count - filled, count, stages)


def _compute_share(
    plan: ProductPlan, ring: _Ring, kept: KeptRows | None, staged: Any, share: _Share, out_ref: Any
) -> None:
    """Sum up this warpgroup's columns of each tile of the share, and write them."""
    schedule = plan.schedule
    steps = jnp.int32(schedule.steps)

    def sum_tile(tile):
        first = jnp.maximum(tile * steps, share.first)
        end = jnp.minimum((tile + 1) * steps, share.end)
        sums = pl.run_scoped(
            functools.partial(
                _accumulate, plan, ring, kept, share.first, first - share.first, end - share.first
            ),
            plgpu.WGMMAAccumulatorRef((plan.group_columns, plan.wgmma_rows), jnp.float32),
        )
        # The programs of a tile follow each other; the last one zeroes the planes that are left.
        plane = lax.axis_index("program") - lax.div(tile * steps, jnp.int32(schedule.share))
        _write(plan, staged, tile, plane, sums, out_ref)
        if not schedule.fills_all_planes:

            @pl.when(end == (tile + 1) * steps)
            def _zero_other_planes():
                @pl.loop(plane + 1, schedule.partials)
                def _zero(other):
                    _write(plan, staged, tile, other, jnp.zeros_like(sums), out_ref)

    pl.loop(lax.div(share.first, steps), lax.div(share.end - 1, steps) + 1)(sum_tile)
    if staged is not None:
        plgpu.wait_smem_to_gmem(0)


def _accumulate(
    plan: ProductPlan,
    ring: _Ring,
    kept: KeptRows | None,
    share_first: jax.Array,
    first: jax.Array,
    end: jax.Array,
    sums: Any,
) -> jax.Array:
    """Sum of the share's steps `[first, end)`, of one tile: [columns, S], weights on the left."""
    warpgroup = lax.axis_index("wg")

    @pl.loop(first, end)
    def _step(index):
        slot = lax.rem(index, jnp.int32(plan.schedule.stages))
        plgpu.barrier_wait(ring.full.at[slot])
        weights = ring.weights.at[slot, warpgroup]
        weights = weights if plan.transposed else weights.transpose((1, 0))
        x = ring.x.at[slot] if kept is None else kept.step(plan, share_first, index)
        plgpu.wgmma(sums, weights, x.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ring.free.at[slot])

    return sums[...]


def _write(
    plan: ProductPlan, staged: Any, tile: jax.Array, plane: jax.Array, sums: jax.Array, out_ref: Any
) -> None:
    """Write the sums [columns, S] of this warpgroup to a plane [S, N], 64 columns at a time."""
    start = _first_column(plan, tile) + lax.axis_index("wg") * plan.group_columns
    for offset in range(0, plan.group_columns, TILE_COLUMNS):
        part = sums[offset : offset + TILE_COLUMNS]
        target = out_ref.at[plane, :, pl.ds(start + offset, TILE_COLUMNS)]
        if staged is None:  # few rows: the numbers of a thread lie in few places
            part = plgpu.layout_cast(part, plgpu.Layout.WGMMA)
            store_columns(part, target, interpreted=plan.is_interpreted)
            continue
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target)
