"""Products whose rows do not depend on each other, bit for bit, in Pallas Mosaic GPU (Hopper).

K is cut into chunks that follow from the weight's shape alone. Each is summed up in its order by
one accumulator, always by the same instruction of 64 columns and 128 rows, and the chunks are added
in float32 in their order: by whoever reads the planes, or in registers. So an element's bits follow
from its row of x and its column of the weight, and from nothing else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.products.fixed_order_kernel import FixedOrderPlan, launch
from pallas_kernels.products.fixed_order_schedule import (
    BLOCK_K,
    WGMMA_COLUMNS,
    FixedOrderSchedule,
    make_fixed_order_schedule,
)

_DTYPES = (jnp.bfloat16, jnp.float16)


def fits_fixed_order_product(depth: int, columns: int, dtype: DTypeLike) -> bool:
    """Whether `fixed_order_product` takes a weight of K = `depth` and N = `columns`."""
    return _refusal(depth, columns, dtype) is None


@functools.partial(
    jax.jit, static_argnames=("transposed", "out_dtype", "interpret", "schedule")
)  # fmt: skip
def fixed_order_product(
    x: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    interpret: Any = None,
    schedule: FixedOrderSchedule | None = None,
) -> jax.Array:
    """Multiply by one layer's weight; a row's result does not depend on the other rows.

    Args:
      x: [T, K] bfloat16 or float16; K a multiple of 64.
      weights: [L, K, N] in x's dtype, transposed [L, N, K]; N a multiple of 64. No layer is
        copied.
      layer: [1] int32, which layer to read.
      transposed: how the weights are stored.
      out_dtype: float32 or x's, which None means.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      schedule: sizes of the kernel; None = what should cost least. Another one gives other bits
        only by other `chunks`.

    Returns:
      `x @ weights[layer]`: [T, N] in `out_dtype`, or float32[P, T, N] whose total over P, added in
      order, is meant. Rounded to `out_dtype`, either has the same bits.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check_inputs(x, weights, transposed, out_dtype)
    num_rows, depth = x.shape
    columns = weights.shape[1 if transposed else 2]
    x = jnp.pad(x, ((0, -num_rows % 8), (0, 0)))
    plan = FixedOrderPlan(
        schedule=schedule or make_fixed_order_schedule(x.shape[0], depth, columns),
        rows=x.shape[0],
        columns=columns,
        transposed=transposed,
        dtype=x.dtype,
        out_dtype=out_dtype,
    )
    out = launch(plan, x, weights, layer, interpret)[:, :num_rows]
    return out if plan.schedule.splits_chunks else out[0]


def _check_inputs(x: jax.Array, weights: jax.Array, transposed: bool, out_dtype: Any) -> None:
    stored = "[L, N, K]" if transposed else "[L, K, N]"
    depth_axis = 2 if transposed else 1
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[depth_axis]:
        raise ValueError(
            f"x must be [T, K] and weights {stored}; got {x.shape} and {weights.shape}"
        )
    if x.dtype != weights.dtype or out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            "x and weights must have one dtype, and the result it or float32; "
            f"got {x.dtype}, {weights.dtype} and {out_dtype}"
        )
    refusal = _refusal(x.shape[1], weights.shape[3 - depth_axis], x.dtype)
    if refusal is not None:
        raise ValueError(refusal)


def _refusal(depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why the kernel does not take a weight; None where it does."""
    if jnp.dtype(dtype) not in _DTYPES:
        return f"x must be bfloat16 or float16; got {jnp.dtype(dtype).name}"
    if depth % BLOCK_K or columns % WGMMA_COLUMNS or not depth or not columns:
        return f"K and N must be multiples of 64; got {depth} and {columns}"
    return None
