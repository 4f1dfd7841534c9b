"""Few rows of x that stay in shared memory, and the prologues that put them there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.fused.mosaic_rows import WARP_LANES, WARPS, load, vector_length
from pallas_kernels.products.product_schedule import ProductSchedule
from pallas_kernels.products.wgmma_tiles import SWIZZLE_COLUMNS, TILED

MAX_KEPT_ROWS = 8
WGMMA_ROWS = 8  # the least that WGMMA multiplies; rows past S hold anything, and are not written
THREADS = WARPS * WARP_LANES
_REGISTERS = 16  # numbers of the output that a thread makes at a time
_CHUNK = 8  # columns that the swizzle of TILED moves together


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """Static numbers of one kernel.

    Attributes:
      schedule: who reads what.
      rows: S; a multiple of 8 where x is not kept.
      depth: K.
      columns: N.
      transposed: the weights are stored [L, N, K].
      dtype: of x and the weights.
      is_interpreted: what Pallas has no word for is said in plain jnp.
    """

    schedule: ProductSchedule
    rows: int
    depth: int
    columns: int
    transposed: bool
    dtype: Any
    is_interpreted: bool

    @property
    def group_columns(self) -> int:
        """Weight columns of one computing warpgroup."""
        return self.schedule.block_n // self.schedule.warpgroups

    @property
    def wgmma_rows(self) -> int:
        """Rows of x that are multiplied."""
        return self.rows + -self.rows % WGMMA_ROWS

    @property
    def keeps_all(self) -> bool:
        """Step s of a tile is kept in place s; else the share's first step is in place 0."""
        return self.schedule.kept_steps == self.schedule.steps

    @property
    def kept_depth(self) -> int:
        """Of K, how much is kept."""
        return self.schedule.kept_steps * self.schedule.block_k


class KeptRows(NamedTuple):
    """The rows of x in shared memory.

    Attributes:
      ref: [kept steps, 8, block_k].
      start: int32, of K, what stands first; from the end of K it goes on at 0.
    """

    ref: Any
    start: jax.Array

    @classmethod
    def of_share(cls, plan: ProductPlan, ref: Any, first: jax.Array) -> "KeptRows":
        """Of a share that begins with step number `first`."""
        step = lax.rem(first, jnp.int32(plan.schedule.steps))
        return cls(ref, jnp.int32(0) if plan.keeps_all else step * plan.schedule.block_k)

    def step(self, plan: ProductPlan, first: jax.Array, index: jax.Array) -> Any:
        """[8, block_k] of the share's step `index`."""
        if not plan.keeps_all:
            return self.ref.at[index]
        return self.ref.at[lax.rem(first + index, jnp.int32(plan.schedule.steps))]


class Prologue(Protocol):
    """Makes the rows of x in the kernel; hashable, all static."""

    def outputs(self, plan: ProductPlan) -> Sequence[jax.ShapeDtypeStruct]:
        """What else it writes; nothing unless it says so."""
        return ()

    def scratch(self, plan: ProductPlan) -> Any:
        """Shared memory of its own; None, which is none, unless it says so."""
        return None

    def fill(
        self, plan: ProductPlan, x: KeptRows, arrays: Sequence[Any], outs: Sequence[Any],
        scratch: Any,
    ) -> None:  # fmt: skip
        """Store the rows, all computing warpgroups together; the caller has a barrier after it."""
        ...


@dataclass(frozen=True)
class WholeRows(Prologue):
    """x as it is, [S, K]."""

    def fill(
        self, plan: ProductPlan, x: KeptRows, arrays: Sequence[Any], outs: Sequence[Any],
        scratch: Any,
    ) -> None:  # fmt: skip
        """Copy what the share needs."""
        del outs, scratch
        (x_ref,) = arrays
        fill_share(plan, x, lambda index, layout: load(x_ref.at[index], layout))


def fits_kept_rows(rows: int, depth: int) -> bool:
    """Whether x [rows, depth] can be kept: each thread of a warpgroup makes a part of a row."""
    return rows <= MAX_KEPT_ROWS and depth % THREADS == 0


def for_each_unit(plan: ProductPlan, units: int, body: Callable[[jax.Array], None]) -> None:
    """Call `body` of each number below `units`, shared out among the computing warpgroups."""
    groups, own = plan.schedule.warpgroups, lax.axis_index("wg")
    if units == groups:
        body(own)
        return

    @pl.loop(0, lax.div(units - own + groups - 1, jnp.int32(groups)))
    def _unit(turn):
        body(turn * groups + own)


def fill_share(
    plan: ProductPlan, x: KeptRows, load_numbers: Callable[[tuple[Any, Any], Any], jax.Array]
) -> None:
    """Keep what the share needs of each row, in blocks.

    Args:
      plan: static numbers.
      x: where to.
      load_numbers: ((row, part of K), layout) -> float32 numbers of the row, in registers.
    """
    block = min(plan.depth, _REGISTERS * THREADS, plan.kept_depth + -plan.kept_depth % 512)
    blocks = -(-plan.kept_depth // block)
    rows = min(plan.rows, _REGISTERS * THREADS // block or 1)  # of one unit
    row_groups = -(-plan.rows // rows)
    layout = _row_layout(block)

    def keep(start, first_row):
        # The last rows may be done twice, with the same result.
        numbers = [jnp.minimum(first_row + i, plan.rows - 1) for i in range(rows)]
        values = [load_numbers((row, pl.ds(start, block)), layout) for row in numbers]
        for row, value in zip(numbers, values, strict=True):
            store_row(plan, x, row, start, value, layout)

    def unit(number):
        first_row = lax.rem(number, jnp.int32(row_groups)) * rows
        start = x.start + lax.div(number, jnp.int32(row_groups)) * block
        start = jnp.where(start >= plan.depth, start - plan.depth, start)
        keep(jnp.minimum(start, plan.depth - block), first_row)
        if not plan.keeps_all:

            @pl.when(start > plan.depth - block)
            def _go_on_at_zero():
                keep(0, first_row)

    for_each_unit(plan, blocks * row_groups, unit)


def _row_layout(size: int) -> Any:
    """Layout of [size], a multiple of 128: the threads of a warpgroup take vectors in turn."""
    vector = vector_length(size // THREADS)
    tiling = plgpu.Tiling(((THREADS * vector,), (WARP_LANES * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def store_row(
    plan: ProductPlan,
    x: KeptRows,
    row: jax.Array,
    start: jax.Array | int,
    values: jax.Array,
    layout: Any,
) -> None:
    """Store numbers of one row that stand in K from `start` on; what is not kept is dropped.

    Args:
      plan: static numbers.
      x: where to.
      row: int32, below 8.
      start: int32.
      values: float32 in registers, in the order of K when flattened.
      layout: of the values.
    """
    values = values.astype(plan.dtype)
    if plan.is_interpreted:
        _store_row_plainly(plan, x, row, start, values.reshape(-1))
        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(TILED), scalar, scalar))
    def store(_, values, ref, row, shift):
        ref = mosaic.utils.memref_fold(ref, 0, 3)  # [kept depth / 64, 8, 64]
        row, shift = (_to_index(number) for number in (row, shift))
        indices = values.layout.thread_idxs(values.shape)
        for index, place in zip(indices, np.ndindex(values.registers.shape), strict=True):
            k = arith.addi(_flat(index, values.shape), shift)
            is_before = arith.cmpi(arith.CmpIPredicate.slt, k, _index(0))
            k = arith.select(is_before, arith.addi(k, _index(plan.depth)), k)
            with mosaic.utils.when(arith.cmpi(arith.CmpIPredicate.slt, k, _index(plan.kept_depth))):
                tile, column = (op(k, _index(SWIZZLE_COLUMNS)) for op in _DIVIDE)
                chunk, rest = (op(column, _index(_CHUNK)) for op in _DIVIDE)
                chunk = arith.muli(arith.xori(chunk, row), _index(_CHUNK))
                vector.store(
                    values.registers[place], ref, [tile, row, arith.addi(chunk, rest)],
                    alignment=2 * values.layout.vector_length,
                )  # fmt: skip

    store(values, x.ref, row, start - x.start)  # pyright: ignore[reportCallIssue]


_DIVIDE = (arith.divui, arith.remui)


def _index(number: int) -> ir.Value:
    return mosaic.utils.c(number, ir.IndexType.get())


def _to_index(scalar: Any) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), scalar.registers.item())


def _flat(index: Sequence[ir.Value], shape: tuple[int, ...]) -> ir.Value:
    """Number of an element of an array that is flattened."""
    flat, *others = index
    for size, one in zip(shape[1:], others, strict=True):
        flat = arith.addi(arith.muli(flat, _index(size)), one)
    return flat


def _store_row_plainly(
    plan: ProductPlan, x: KeptRows, row: jax.Array, start: jax.Array | int, values: jax.Array
) -> None:
    """The same, a step at a time."""
    block_k = plan.schedule.block_k

    @pl.loop(0, plan.schedule.kept_steps)
    def _step(step):
        k = lax.rem(x.start + step * block_k, jnp.int32(plan.depth)) - start

        @pl.when((k >= 0) & (k + block_k <= values.size))
        def _store():
            x.ref[step, row] = lax.dynamic_slice(values, (k,), (block_k,))
