"""The fixed-order product's kernel: a ring of weights and x, WGMMA with the weights on the left."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.mosaic_rows import divide, interpret_option
from pallas_kernels.products.fixed_order_schedule import (
    BLOCK_K,
    ROW_TILE,
    STAGED_BYTES,
    WGMMA_COLUMNS,
    FixedOrderSchedule,
)
from pallas_kernels.products.ring import drain, multiply_steps
from pallas_kernels.products.wgmma_tiles import TILED, TILED_FLOAT32

# Registers of a thread by computing warpgroups: they get most of what the loading one has.
_COMPUTE_REGISTERS = {2: 232, 3: 160}
_LOAD_REGISTERS = {2: 40, 3: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOrderPlan:
    """Static numbers of one kernel: the schedule, padded rows T, N, and the arrays' forms."""

    schedule: FixedOrderSchedule
    rows: int
    columns: int
    transposed: bool
    dtype: Any
    out_dtype: Any

    @property
    def result_dtype(self) -> Any:
        """Of planes, or of the whole result."""
        return jnp.dtype(jnp.float32) if self.schedule.splits_chunks else self.out_dtype

    @property
    def tile_rows(self) -> int:
        """Rows of x in a tile: all of a WGMMA, unless there are fewer."""
        return min(self.rows, ROW_TILE)

    @property
    def staged_rows(self) -> int:
        """Rows of the output that a warpgroup stages at a time."""
        return STAGED_BYTES // (WGMMA_COLUMNS * self.result_dtype.itemsize)


class _Ring(NamedTuple):
    """Tiles of weights and x in shared memory, and who may touch them."""

    weights: Any  # [stages, warpgroups, 64, group_columns], transposed [..., group_columns, 64]
    x: Any  # [stages, 128, 64]; rows that x lacks are never written
    full: Any
    free: Any


class _Item(NamedTuple):
    """A piece of work, int32 scalars: where its tile begins, and its chunks `[chunk, end)`."""

    row: jax.Array
    column: jax.Array
    chunk: jax.Array
    end: jax.Array


def launch(
    plan: FixedOrderPlan, x: jax.Array, weights: jax.Array, layer: jax.Array, interpret: Any
) -> jax.Array:
    """[P, T, N], P being 1 where chunks are not split."""
    schedule = plan.schedule
    planes = schedule.chunks if schedule.splits_chunks else 1
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((planes, plan.rows, plan.columns), plan.result_dtype),
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=schedule.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        **interpret_option(interpret),
    )
    return run(x, weights, layer)


def _kernel(plan: FixedOrderPlan, x_ref: Any, w_ref: Any, layer_ref: Any, out_ref: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    schedule = plan.schedule
    computing, stages = schedule.warpgroups, schedule.stages

    def run(ring, staged):
        @pl.when(lax.axis_index("wg") < computing)
        def _compute():
            if computing > 1:
                plgpu.set_max_registers(_COMPUTE_REGISTERS[computing], action="increase")
            _compute_items(plan, ring, staged.at[lax.axis_index("wg")], out_ref)

        @pl.when(lax.axis_index("wg") == computing)
        def _load():
            if computing > 1:
                plgpu.set_max_registers(_LOAD_REGISTERS[computing], action="decrease")
            _load_items(plan, ring, x_ref, w_ref, layer_ref)

    tile = (BLOCK_K, schedule.group_columns)
    tile = tile[::-1] if plan.transposed else tile
    ring = _Ring(
        weights=plgpu.SMEM((stages, computing, *tile), plan.dtype, transforms=TILED),
        x=plgpu.SMEM((stages, ROW_TILE, BLOCK_K), plan.dtype, transforms=TILED),
        full=plgpu.Barrier(num_arrivals=computing + 1, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    )
    staged = plgpu.SMEM(
        (computing, plan.staged_rows, WGMMA_COLUMNS),
        plan.result_dtype,
        transforms=TILED_FLOAT32 if plan.result_dtype == jnp.float32 else TILED,
    )
    pl.run_scoped(run, ring, staged, collective_axes="wg")


def _for_each_item(plan: FixedOrderPlan, do: Any) -> jax.Array:
    """Call `do(item, position) -> next position` for this program's items.

    Returns:
      The position behind the last: how many steps went through the ring.
    """
    schedule = plan.schedule
    program, programs = lax.axis_index("program"), jnp.int32(schedule.programs)
    mine = lax.div(schedule.items - program + (programs - 1), programs)

    def step(index, position):
        return do(_item(plan, program + index * programs), position)

    return lax.fori_loop(0, mine, step, jnp.int32(0))


def _item(plan: FixedOrderPlan, number: jax.Array) -> _Item:
    """Items of one tile follow each other; tiles go down a group of rows, then to the right."""
    schedule = plan.schedule
    chunk, end = jnp.int32(0), jnp.int32(schedule.chunks)
    if schedule.splits_chunks:
        number, chunk = divide(number, schedule.chunks)
        end = chunk + 1
    group, place = divide(number, schedule.row_group * schedule.column_tiles)
    first = group * schedule.row_group
    rows = jnp.minimum(schedule.row_group, schedule.row_tiles - first)
    column, row = lax.div(place, rows), first + lax.rem(place, rows)
    # The last tiles begin where they still fit; what is done twice has the same result.
    return _Item(
        row=jnp.minimum(row * ROW_TILE, plan.rows - plan.tile_rows),
        column=jnp.minimum(
            column * schedule.tile_columns, plan.columns - schedule.tile_columns
        ),
        chunk=chunk,
        end=end,
    )  # fmt: skip


def _steps(plan: FixedOrderPlan, item: _Item) -> tuple[jax.Array, jax.Array]:
    """Ring steps `[first, end)` of an item."""
    schedule = plan.schedule
    end = jnp.minimum(item.end * schedule.chunk_steps, schedule.steps)
    return item.chunk * schedule.chunk_steps, end


def _load_items(plan: FixedOrderPlan, ring: _Ring, x_ref: Any, w_ref: Any, layer_ref: Any) -> None:
    """Fetch the weights and rows of x of all items, in order."""
    schedule = plan.schedule
    stages = jnp.int32(schedule.stages)
    layer = layer_ref[0]

    def load(item: _Item, position):
        first, end = _steps(plan, item)

        @pl.loop(0, end - first)
        def _fetch(index):
            slot = lax.rem(position + index, stages)
            pl.when(position + index >= stages)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
            depth = pl.ds((first + index) * BLOCK_K, BLOCK_K)
            for group in range(schedule.warpgroups):
                columns = pl.ds(item.column + group * schedule.group_columns,
                                schedule.group_columns)  # fmt: skip
                place = (columns, depth) if plan.transposed else (depth, columns)
                source, target = w_ref.at[(layer, *place)], ring.weights.at[slot, group]
                plgpu.copy_gmem_to_smem(source, target, ring.full.at[slot])
            rows = pl.ds(0, plan.tile_rows)
            source = x_ref.at[pl.ds(item.row, plan.tile_rows), depth]
            plgpu.copy_gmem_to_smem(source, ring.x.at[slot, rows], ring.full.at[slot])

        return position + (end - first)

    position = _for_each_item(plan, load)

    drain(ring, jnp.maximum(position - stages, 0), position, stages)


def _compute_items(plan: FixedOrderPlan, ring: _Ring, staged: Any, out_ref: Any) -> None:
    """Sum up this warpgroup's columns of all items, and write them."""
    schedule = plan.schedule

    def compute(item: _Item, position):
        first, end = _steps(plan, item)
        steps = jnp.minimum(end - first, schedule.chunk_steps)
        total = _sum_chunk(plan, ring, position, steps)
        if schedule.chunks > 1 and not schedule.splits_chunks:

            def add(chunk, total):
                start = chunk * schedule.chunk_steps
                steps = jnp.minimum(schedule.chunk_steps, schedule.steps - start)
                return total + _sum_chunk(plan, ring, position + start, steps)

            total = lax.fori_loop(1, schedule.chunks, add, total)
        plane = item.chunk if schedule.splits_chunks else 0
        _write(plan, staged, out_ref.at[plane], item, total)
        return position + (end - first)

    _for_each_item(plan, compute)
    plgpu.wait_smem_to_gmem(0)


def _sum_chunk(
    plan: FixedOrderPlan, ring: _Ring, position: jax.Array, steps: jax.Array
) -> jax.Array:
    """Sum of `steps` ring steps from `position` on: [columns, 128], weights on the left."""
    warpgroup = lax.axis_index("wg")

    def accumulate(sums):
        def multiply(slot):
            weights = ring.weights.at[slot, warpgroup]
            weights = weights if plan.transposed else weights.transpose((1, 0))
            plgpu.wgmma(sums, weights, ring.x.at[slot].transpose((1, 0)))

        multiply_steps(ring, position, steps, plan.schedule.stages, multiply)
        return sums[...]

    shape = (plan.schedule.group_columns, ROW_TILE)
    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _write(plan: FixedOrderPlan, staged: Any, out_ref: Any, item: _Item, sums: jax.Array) -> None:
    """Write the sums [columns, 128] of this warpgroup to [T, N], some rows of 64 columns a time."""
    start = item.column + lax.axis_index("wg") * plan.schedule.group_columns
    for column in range(0, plan.schedule.group_columns, WGMMA_COLUMNS):
        for row in range(0, plan.tile_rows, plan.staged_rows):
            count = min(plan.staged_rows, plan.tile_rows - row)
            part = sums[column : column + WGMMA_COLUMNS, row : row + count]
            part = part.astype(plan.result_dtype)
            source = staged.at[pl.ds(0, count)]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            source.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            rows = pl.ds(item.row + row, count)
            plgpu.copy_smem_to_gmem(source, out_ref.at[rows, pl.ds(start + column, WGMMA_COLUMNS)])
