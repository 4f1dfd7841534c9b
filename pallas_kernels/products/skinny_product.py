"""Products of few rows in Pallas Mosaic GPU (Hopper): a layer's weight, read where it lies."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.cacheable_kernels import make_kernels_cacheable
from pallas_kernels.platform import gpu_kind
from pallas_kernels.products.product_schedule import TILE_COLUMNS, ProductSchedule, make_schedule
from pallas_kernels.products.product_tuning import ProductTuningConfig, product_tuning

make_kernels_cacheable()

MAX_ROWS = 128
_DTYPES = (jnp.bfloat16, jnp.float16)

# What WGMMA reads from shared memory, and what it leaves there without bank conflicts.
_TILED: Any = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_STAGED: Any = (
    plgpu.TilingTransform((8, 32)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def fits_skinny_product(
    x_shape: tuple[int, ...], weights_shape: tuple[int, ...], dtype: DTypeLike, transposed: bool
) -> bool:
    """Whether `skinny_product` takes x [S, K] and the weights [L, K, N] (transposed [L, N, K])."""
    return _refusal(x_shape, weights_shape, dtype, transposed) is None


@functools.partial(jax.jit, static_argnames=("transposed", "interpret", "tuning"))
def skinny_product(
    x: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    transposed: bool = False,
    interpret: Any = None,
    tuning: ProductTuningConfig | None = None,
) -> jax.Array:
    """Multiply few rows by one layer's weight, as partial sums over K.

    Args:
      x: [S, K] bfloat16 or float16; S at most 128, K a multiple of 64.
      weights: [L, K, N] in x's dtype, transposed [L, N, K]; N a multiple of 64. No layer is
        copied.
      layer: [1] int32, which layer to read.
      transposed: how the weights are stored.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      [P, S, N] float32, whose sum over P is `x @ weights[layer]`. P follows from the shapes and
      the tuning; it is 1 where `transposed` and `tuning` is None.

    Raises:
      ValueError: shapes or dtypes do not fit, or no tile of `tuning` does.

    Source: Osama et al. 2023 (Stream-K: equal shares of tiles and ring steps).
    """
    if x.dtype != weights.dtype:
        raise ValueError(f"x and weights must have one dtype; got {x.dtype} and {weights.dtype}")
    refusal = _refusal(x.shape, weights.shape, x.dtype, transposed)
    if refusal is not None:
        raise ValueError(refusal)
    num_rows, depth = x.shape
    columns = weights.shape[1 if transposed else 2]
    x = jnp.pad(x, ((0, -num_rows % 8), (0, 0)))
    if tuning is None:
        tuning = product_tuning(gpu_kind(), x.shape[0], depth, columns, transposed)
    plan = _Plan(
        schedule=make_schedule(x.shape[0], depth, columns, transposed, tuning),
        rows=x.shape[0],
        columns=columns,
        transposed=transposed,
        dtype=x.dtype,
    )
    return _launch(plan, x, weights, layer, interpret)[:, :num_rows]


def _refusal(
    x_shape: tuple[int, ...], weights_shape: tuple[int, ...], dtype: DTypeLike, transposed: bool
) -> str | None:
    """Why the kernel does not take these arrays; None where it does."""
    stored = "[L, N, K]" if transposed else "[L, K, N]"
    if len(x_shape) != 2 or len(weights_shape) != 3:
        return f"x must be [S, K] and weights {stored}; got {x_shape} and {weights_shape}"
    depth, columns = weights_shape[:0:-1] if transposed else weights_shape[1:]
    if x_shape[1] != depth:
        return f"weights must be {stored} with x's K {x_shape[1]}; got {weights_shape}"
    if dtype not in _DTYPES:
        return f"x must be bfloat16 or float16; got {jnp.dtype(dtype).name}"
    if not 1 <= x_shape[0] <= MAX_ROWS:
        return f"rows of x must be from 1 to {MAX_ROWS}; got {x_shape[0]}"
    if depth % 64 or columns % TILE_COLUMNS or not depth or not columns:
        return f"K and N must be multiples of 64; got {depth} and {columns}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Static numbers of one kernel: the schedule, padded rows S, N, and how weights are stored."""

    schedule: ProductSchedule
    rows: int
    columns: int
    transposed: bool
    dtype: Any

    @property
    def group_columns(self) -> int:
        """Weight columns of one computing warpgroup."""
        return self.schedule.block_n // self.schedule.warpgroups


class _Ring(NamedTuple):
    """Tiles of weights and x in shared memory, and who may touch them."""

    weights: Any  # [stages, warpgroups, block_k, columns], transposed [..., columns, block_k]
    x: Any  # [stages, S, block_k]
    full: Any
    free: Any


class _Share(NamedTuple):
    """Numbers of the steps `[first, end)` of this program, int32 scalars."""

    first: jax.Array
    end: jax.Array


def _launch(plan: _Plan, x: jax.Array, weights: jax.Array, layer: jax.Array, interpret: Any):
    schedule = plan.schedule
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((schedule.partials, plan.rows, plan.columns), jnp.float32),
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=schedule.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(x, weights, layer)


def _kernel(plan: _Plan, x_ref: Any, w_ref: Any, layer_ref: Any, out_ref: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    schedule = plan.schedule
    computing, stages = schedule.warpgroups, schedule.stages

    def run(ring, staged):
        first = lax.axis_index("program") * schedule.share
        all_steps = schedule.tiles * schedule.steps
        share = _Share(first, jnp.minimum(first + schedule.share, all_steps))

        @pl.when(lax.axis_index("wg") < computing)
        def _compute():
            _compute_share(plan, ring, staged.at[lax.axis_index("wg")], share, out_ref)

        @pl.when(lax.axis_index("wg") == computing)
        def _load():
            _load_share(plan, ring, share, x_ref, w_ref, layer_ref)

    tile = (schedule.block_k, plan.group_columns)
    tile = tile[::-1] if plan.transposed else tile
    ring = _Ring(
        weights=plgpu.SMEM((stages, computing, *tile), plan.dtype, transforms=_TILED),
        x=plgpu.SMEM((stages, plan.rows, schedule.block_k), plan.dtype, transforms=_TILED),
        full=plgpu.Barrier(num_arrivals=computing + 1, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=computing, num_barriers=stages),
    )
    staged = plgpu.SMEM((computing, plan.rows, TILE_COLUMNS), jnp.float32, transforms=_STAGED)
    pl.run_scoped(run, ring, staged, collective_axes="wg")


def _first_column(plan: _Plan, tile: jax.Array) -> jax.Array:
    """Where a tile begins; the last one ends with the weight, so it may overlap its neighbour."""
    return jnp.minimum(tile * plan.schedule.block_n, plan.columns - plan.schedule.block_n)


def _load_share(
    plan: _Plan, ring: _Ring, share: _Share, x_ref: Any, w_ref: Any, layer_ref: Any
) -> None:
    """Fetch the steps of this program; the ring is first filled with weights, then with x."""
    schedule = plan.schedule
    stages, steps = jnp.int32(schedule.stages), jnp.int32(schedule.steps)
    layer = layer_ref[0]
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

    @pl.loop(0, filled)
    def _fill_x(index):
        fetch_x(index, index)

    @pl.loop(filled, count)
    def _refill(index):
        slot = lax.rem(index, stages)
        plgpu.barrier_wait(ring.free.at[slot])
        fetch_weights(index, slot)
        fetch_x(index, slot)

    @pl.loop(count - filled, count)
    def _drain(index):  # so that no barrier dies in use
        plgpu.barrier_wait(ring.free.at[lax.rem(index, stages)])


def _compute_share(plan: _Plan, ring: _Ring, staged: Any, share: _Share, out_ref: Any) -> None:
    """Sum up this warpgroup's columns of each tile of the share, and write them."""
    schedule = plan.schedule
    steps = jnp.int32(schedule.steps)

    def sum_tile(tile):
        first = jnp.maximum(tile * steps, share.first)
        end = jnp.minimum((tile + 1) * steps, share.end)
        sums = pl.run_scoped(
            functools.partial(_accumulate, plan, ring, first - share.first, end - share.first),
            plgpu.WGMMAAccumulatorRef((plan.group_columns, plan.rows), jnp.float32),
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
    plgpu.wait_smem_to_gmem(0)


def _accumulate(plan: _Plan, ring: _Ring, first: jax.Array, end: jax.Array, sums: Any) -> jax.Array:
    """Sum of the ring steps `[first, end)` of one tile: [columns, S], weights on the left."""
    warpgroup = lax.axis_index("wg")

    @pl.loop(first, end)
    def _step(index):
        slot = lax.rem(index, jnp.int32(plan.schedule.stages))
        plgpu.barrier_wait(ring.full.at[slot])
        weights = ring.weights.at[slot, warpgroup]
        weights = weights if plan.transposed else weights.transpose((1, 0))
        plgpu.wgmma(sums, weights, ring.x.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ring.free.at[slot])

    return sums[...]


def _write(
    plan: _Plan, staged: Any, tile: jax.Array, plane: jax.Array, sums: jax.Array, out_ref: Any
) -> None:
    """Write the sums [columns, S] of this warpgroup to a plane [S, N], 64 columns at a time."""
    start = _first_column(plan, tile) + lax.axis_index("wg") * plan.group_columns
    for offset in range(0, plan.group_columns, TILE_COLUMNS):
        part = sums[offset : offset + TILE_COLUMNS]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        target = out_ref.at[plane, :, pl.ds(start + offset, TILE_COLUMNS)]
        plgpu.copy_smem_to_gmem(staged, target)
