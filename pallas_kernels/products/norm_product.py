"""Residual sum, RMSNorm and a product of few rows in one Pallas Mosaic GPU kernel (Hopper)."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.fused.fused_inputs import check_shape, check_sum
from pallas_kernels.fused.mosaic_rows import (
    WARP_LANES,
    WARPS,
    layer_index,
    load,
    load_sum,
    round_to,
    rows_layout,
)
from pallas_kernels.products.kept_rows import (
    THREADS,
    KeptRows,
    ProductPlan,
    Prologue,
    fits_kept_rows,
    for_each_unit,
    store_row,
)
from pallas_kernels.products.product_kernel import launch
from pallas_kernels.products.product_tuning import ProductTuningConfig
from pallas_kernels.products.skinny_product import check_product, fits_skinny_product, make_plan

MAX_WIDTH = 8192  # all of it stays in shared memory, beside the weights in flight
_REGISTERS = 32  # numbers of x that a thread holds at a time


@functools.partial(
    jax.jit, static_argnames=("eps", "gain_offset", "transposed", "interpret", "tuning")
)
def norm_product(
    x: jax.Array,
    delta: jax.Array | None,
    gains: jax.Array,
    gains_layer: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    gain_offset: float = 0.0,
    transposed: bool = False,
    interpret: Any = None,
    tuning: ProductTuningConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add to the residual, normalise, and multiply by one layer's weight.

    Each thread block normalises all rows by itself, while its first weights are on their way; so
    rows must be few.

    Args:
      x: [S, D] bfloat16 or float16, the residual; S at most 8, D a multiple of 128 up to 8192.
      delta: [S, D] in x's dtype, or float32[P, S, D] whose total over P is first rounded to x's
        dtype; None = the residual stays as it is.
      gains: [L, D] in x's dtype, of all layers.
      gains_layer: int32[1], which gains to read.
      weights: [L, D, N] in x's dtype, transposed [L, N, D]; N a multiple of 64.
      layer: int32[1], which weights to read.
      eps: added to the mean square.
      gain_offset: added to the gains in float32 (Gemma: 1).
      transposed: how the weights are stored.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      `x + delta` (x itself without a delta), [S, D]; and float32[P, S, N], whose sum over P is the
      product of its norm.

    Raises:
      ValueError: shapes or dtypes do not fit, or no tile of `tuning` does.
    """
    check_product("x", x.shape, x.dtype, weights, transposed)
    S, D = x.shape
    if not _fits(S, D):
        raise ValueError(
            f"S must be at most 8 and D a multiple of {THREADS} up to {MAX_WIDTH}; got {S} and {D}"
        )
    check_shape("gains", gains, (None, D))
    if delta is not None:
        check_sum("delta", delta, D, x.dtype)
    plan = make_plan(x.shape, weights, transposed, "all", tuning, interpret)
    prologue = _NormedRows(has_delta=delta is not None, eps=eps, gain_offset=gain_offset)
    arrays = [
        array.reshape(*array.shape[:-1], WARPS, D // WARPS)
        for array in (x, delta, gains)
        if array is not None
    ]
    sums, *outs = launch(plan, prologue, [*arrays, gains_layer], weights, layer, interpret)
    return (outs[0].reshape(S, D) if outs else x), sums


def fits_norm_product(
    x_shape: tuple[int, ...], weights_shape: tuple[int, ...], dtype: DTypeLike
) -> bool:
    """Whether `norm_product` takes x [S, D] and the weights [L, D, N]."""
    return fits_skinny_product(x_shape, weights_shape, dtype, transposed=False) and _fits(*x_shape)


def _fits(rows: int, width: int) -> bool:
    return fits_kept_rows(rows, width) and width <= MAX_WIDTH


@dataclass(frozen=True, kw_only=True)
class _NormedRows(Prologue):
    """The prologue: arrays and outputs are cut into [..., warps, columns], a row each warpgroup."""

    has_delta: bool
    eps: float
    gain_offset: float

    def outputs(self, plan: ProductPlan) -> Sequence[jax.ShapeDtypeStruct]:
        """The residual, where it has changed."""
        shape = (plan.rows, WARPS, plan.depth // WARPS)
        return [jax.ShapeDtypeStruct(shape, plan.dtype)] * self.has_delta

    def scratch(self, plan: ProductPlan) -> Any:
        """Sums of squares of each warp."""
        shape = (plan.schedule.warpgroups * _rows_of_a_unit(plan) * WARPS,)
        return plgpu.SMEM(shape, jnp.float32)

    def fill(
        self, plan: ProductPlan, x: KeptRows, arrays: Sequence[Any], outs: Sequence[Any],
        scratch: Any,
    ) -> None:  # fmt: skip
        """Normalise all rows; one of the thread blocks writes a row's new residual."""
        *inputs, gains_ref, layer_ref = arrays
        columns = plan.depth // WARPS
        layout = rows_layout(WARPS, columns, WARP_LANES)
        row_parts = (pl.ds(0, WARPS), pl.ds(0, columns))
        rows = _rows_of_a_unit(plan)

        def load_row(row):
            index = (row, *row_parts)
            y = load(inputs[0].at[index], layout)
            if not self.has_delta:
                return y
            return round_to(y + load_sum(inputs[1], index, layout, plan.dtype), plan.dtype)

        def unit(number):
            # The last rows may be done twice, with the same result.
            numbers = [jnp.minimum(number * rows + i, plan.rows - 1) for i in range(rows)]
            gains_index = (layer_index(layer_ref, gains_ref), *row_parts)
            gains = load(gains_ref.at[gains_index], layout) + self.gain_offset
            values = [load_row(row) for row in numbers]
            places = [(lax.axis_index("wg") * rows + i) * WARPS for i in range(rows)]
            for place, y in zip(places, values, strict=True):
                scratch[pl.ds(place, WARPS)] = jnp.sum(y * y, axis=1)
            plgpu.commit_smem()
            for row, place, y in zip(numbers, places, values, strict=True):
                total = sum(scratch[place + warp] for warp in range(WARPS))
                normed = y * lax.rsqrt(total / plan.depth + self.eps) * gains
                store_row(plan, x, row, jnp.int32(0), normed, layout)
                if outs:
                    self._write_residual(plan, outs[0].at[(row, *row_parts)], row, y)

        for_each_unit(plan, -(-plan.rows // rows), unit)

    def _write_residual(self, plan: ProductPlan, ref: Any, row: jax.Array, y: jax.Array) -> None:
        writer = lax.rem(row, jnp.int32(plan.schedule.programs))

        @pl.when(lax.axis_index("program") == writer)
        def _write():
            ref[...] = y.astype(plan.dtype)


def _rows_of_a_unit(plan: ProductPlan) -> int:
    """Rows that a warpgroup has in registers together."""
    return min(plan.rows, _REGISTERS * THREADS // plan.depth or 1)
