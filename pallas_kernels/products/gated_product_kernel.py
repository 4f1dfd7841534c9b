"""The gated product's kernel: a ring of x and weights, two sums in registers, the gate of them.

A thread block makes its tiles of rows and columns one after another. Its loading warpgroup runs
ahead through the ring, also while the computing ones, of 64 rows each, gate and store. Where there
are fewer rows, the missing ones are computed for nothing: reading the weights takes longer.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.fused_inputs import Activation
from pallas_kernels.fused.gated_activation import activate
from pallas_kernels.fused.mosaic_rows import divide, interpret_option, layer_index
from pallas_kernels.products.ring import drain, multiply_steps
from pallas_kernels.products.wgmma_tiles import TILED

BLOCK_K = 64  # of a ring step
GROUP_ROWS = 64  # of x, of one WGMMA
STORED_COLUMNS = 64  # that a warpgroup stages at a time
COLUMN_TILES = (64, 128)

_SHARED_NUMBERS = 112 << 10  # of 2 bytes, in ring and staged output; 3 KiB are left for the rest
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 232, 40  # of a thread, of 3 warpgroups; 2 begin with enough


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedProductTuning:
    """Sizes of the kernel.

    Attributes:
      column_tile: columns of the output in a tile, 64 or 128: so many of the gate, and of up.
      warpgroups: computing ones, 1 or 2, of 64 rows of a tile each.
      stages: ring steps in flight at most, 2 or more; shared memory may hold fewer.
      row_group: row tiles that are computed side by side, so that L2 holds their weights.
      programs: thread blocks at most, one a multiprocessor.
    """

    column_tile: int = 128
    warpgroups: int = 2
    stages: int = 8
    row_group: int = 8
    programs: int = 132

    def __post_init__(self):
        """Refuse what would not fit registers, or never begin or end."""
        if self.column_tile not in COLUMN_TILES:
            raise ValueError(f"column_tile must be 64 or 128; got {self.column_tile}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2; got {self.warpgroups}")
        if self.stages < 2:  # a slot is only freed when the next step has come
            raise ValueError(f"stages must be at least 2; got {self.stages}")
        others = self.row_group, self.programs
        if min(others) < 1:
            raise ValueError(f"row_group and programs must be at least 1; got {others}")

    @property
    def row_tile(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * GROUP_ROWS

    @property
    def ring_stages(self) -> int:
        """Ring steps in flight, beside the staged output."""
        step = (self.row_tile + 2 * self.column_tile) * BLOCK_K
        return min(self.stages, (_SHARED_NUMBERS - self.row_tile * self.column_tile) // step)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedProductPlan:
    """Static numbers of one kernel: padded rows T, D, F, and how it is done."""

    rows: int
    depth: int
    width: int
    activation: Activation
    dtype: Any
    tuning: GatedProductTuning

    @property
    def steps(self) -> int:
        """Ring steps of a tile."""
        return self.depth // BLOCK_K

    @property
    def tile_rows(self) -> int:
        """Rows of x in a tile: all that a tile takes, unless there are fewer."""
        return min(self.rows, self.tuning.row_tile)

    @property
    def row_tiles(self) -> int:
        """Of x; the last one overlaps its neighbour."""
        return -(-self.rows // self.tuning.row_tile)

    @property
    def column_tiles(self) -> int:
        """Of the output; likewise."""
        return -(-self.width // self.tuning.column_tile)

    @property
    def tiles(self) -> int:
        """Of the output, which the programs share."""
        return self.row_tiles * self.column_tiles

    @property
    def programs(self) -> int:
        """Thread blocks."""
        return min(self.tiles, self.tuning.programs)


class _Ring(NamedTuple):
    """Tiles of x and weights in shared memory, and who may touch them."""

    x: Any  # [stages, row_tile, BLOCK_K]; rows that x lacks are never written
    weights: Any  # [stages, 2, BLOCK_K, column_tile], gate and up
    full: Any
    free: Any


class _Tile(NamedTuple):
    """Where a tile of the output begins, int32 scalars."""

    row: jax.Array
    column: jax.Array


def launch(
    plan: GatedProductPlan, x: jax.Array, weights: jax.Array, layer: jax.Array, interpret: Any
) -> jax.Array:
    """[T, F], of x [T, D] and weights [L, D, 2 * F]."""
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.rows, plan.width), plan.dtype),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=plan.tuning.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
        ),
        **interpret_option(interpret),
    )
    return run(x, weights, layer)


def _kernel(plan: GatedProductPlan, x_ref: Any, w_ref: Any, layer_ref: Any, out_ref: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    tuning, warpgroups, stages = plan.tuning, plan.tuning.warpgroups, plan.tuning.ring_stages

    def run(ring, staged):
        @pl.when(lax.axis_index("wg") < warpgroups)
        def _compute():
            if warpgroups == 2:
                plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute_tiles(plan, ring, staged.at[lax.axis_index("wg")], out_ref)

        @pl.when(lax.axis_index("wg") == warpgroups)
        def _load():
            if warpgroups == 2:
                plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            _load_tiles(plan, ring, x_ref, w_ref, layer_ref)

    weights_shape = (stages, 2, BLOCK_K, tuning.column_tile)
    ring = _Ring(
        x=plgpu.SMEM((stages, tuning.row_tile, BLOCK_K), plan.dtype, transforms=TILED),
        weights=plgpu.SMEM(weights_shape, plan.dtype, transforms=TILED),
        full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    )
    slots = tuning.column_tile // STORED_COLUMNS
    staged_shape = (warpgroups, slots, GROUP_ROWS, STORED_COLUMNS)
    staged = plgpu.SMEM(staged_shape, plan.dtype, transforms=TILED)
    pl.run_scoped(run, ring, staged, collective_axes="wg")


def _for_each_tile(plan: GatedProductPlan, do: Any) -> jax.Array:
    """Call `do(tile, position)` for this program's tiles, whose first ring step is `position`.

    Returns:
      How many steps went through the ring.
    """
    program, programs = lax.axis_index("program"), jnp.int32(plan.programs)
    mine = lax.div(plan.tiles - program + (programs - 1), programs)

    @pl.loop(0, mine)
    def _step(index):
        do(_tile(plan, program + index * programs), index * plan.steps)

    return mine * plan.steps


def _tile(plan: GatedProductPlan, number: jax.Array) -> _Tile:
    """Tiles go down a group of rows, then to the right."""
    row_group, column_tile = min(plan.tuning.row_group, plan.row_tiles), plan.tuning.column_tile
    group, place = divide(number, row_group * plan.column_tiles)
    first = group * row_group
    rows = jnp.minimum(row_group, plan.row_tiles - first)
    column, row = lax.div(place, rows), first + lax.rem(place, rows)
    # The last tiles begin where they still fit; what is done twice has the same result.
    return _Tile(
        row=jnp.minimum(row * plan.tuning.row_tile, plan.rows - plan.tile_rows),
        column=jnp.minimum(column * column_tile, plan.width - column_tile),
    )


def _load_tiles(
    plan: GatedProductPlan, ring: _Ring, x_ref: Any, w_ref: Any, layer_ref: Any
) -> None:
    """Fetch the rows of x and the weights of all tiles, in order."""
    stages = jnp.int32(plan.tuning.ring_stages)
    layer = layer_index(layer_ref, w_ref)

    def load(tile: _Tile, position):
        @pl.loop(0, plan.steps)
        def _fetch(index):
            slot = lax.rem(position + index, stages)
            pl.when(position + index >= stages)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
            depth = pl.ds(index * BLOCK_K, BLOCK_K)
            for part in range(2):
                columns = pl.ds(tile.column + part * plan.width, plan.tuning.column_tile)
                source, target = w_ref.at[layer, depth, columns], ring.weights.at[slot, part]
                plgpu.copy_gmem_to_smem(source, target, ring.full.at[slot])
            source = x_ref.at[pl.ds(tile.row, plan.tile_rows), depth]
            target = ring.x.at[slot, pl.ds(0, plan.tile_rows)]
            plgpu.copy_gmem_to_smem(source, target, ring.full.at[slot])

    end = _for_each_tile(plan, load)

    drain(ring, jnp.maximum(end - stages, 0), end, stages)


def _compute_tiles(plan: GatedProductPlan, ring: _Ring, staged: Any, out_ref: Any) -> None:
    """Make and store this warpgroup's rows of all tiles."""

    def compute(tile: _Tile, position):
        gate, up = _multiply(plan, ring, position)
        _gate_and_store(plan, staged, out_ref, tile, gate, up)

    _for_each_tile(plan, compute)
    plgpu.wait_smem_to_gmem(0)


def _multiply(
    plan: GatedProductPlan, ring: _Ring, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gate and up, float32[64, column_tile] each, from the ring's steps from `position` on."""
    rows = pl.ds(lax.axis_index("wg") * GROUP_ROWS, GROUP_ROWS)

    def accumulate(gate, up):
        def multiply(slot):
            for part, sums in enumerate((gate, up)):
                plgpu.wgmma(sums, ring.x.at[slot, rows], ring.weights.at[slot, part])

        stages = plan.tuning.ring_stages
        multiply_steps(ring, position, plan.steps, stages, multiply, num_products=2)
        return gate[...], up[...]

    sums = plgpu.WGMMAAccumulatorRef((GROUP_ROWS, plan.tuning.column_tile), jnp.float32)
    return pl.run_scoped(accumulate, sums, sums)


def _gate_and_store(
    plan: GatedProductPlan, staged: Any, out_ref: Any, tile: _Tile, gate: jax.Array, up: jax.Array
) -> None:
    """Store `activation(gate) * up` of this warpgroup, some columns at a time."""
    slots = plan.tuning.column_tile // STORED_COLUMNS
    for slot in range(slots):
        start = slot * STORED_COLUMNS
        part = slice(start, start + STORED_COLUMNS)
        gated = (activate(plan.activation, gate[:, part]) * up[:, part]).astype(plan.dtype)
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # of the tile before, this slot
        staged[slot] = gated
        plgpu.commit_smem()
        columns = pl.ds(tile.column + start, STORED_COLUMNS)
        for group in range(plan.tuning.warpgroups):  # the last one may lack rows, or all of them
            count = min(GROUP_ROWS, plan.tile_rows - group * GROUP_ROWS)
            if count > 0:
                rows = pl.ds(tile.row + group * GROUP_ROWS, count)
                source, target = staged.at[slot, pl.ds(0, count)], out_ref.at[rows, columns]
                store = functools.partial(plgpu.copy_smem_to_gmem, source, target)
                pl.when(lax.axis_index("wg") == group)(store)
