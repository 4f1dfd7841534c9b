"""Products of few rows in Pallas Mosaic GPU (Hopper): a layer's weight, read where it lies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.platform import gpu_kind
from pallas_kernels.products.kept_rows import ProductPlan, WholeRows, fits_kept_rows
from pallas_kernels.products.product_kernel import launch
from pallas_kernels.products.product_schedule import TILE_COLUMNS, Kept, make_schedule
from pallas_kernels.products.product_tuning import ProductTuningConfig, product_tuning

MAX_ROWS = 128
_DTYPES = (jnp.bfloat16, jnp.float16)


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
    check_product("x", x.shape, x.dtype, weights, transposed)
    num_rows = x.shape[0]
    is_kept = num_rows % 8 != 0 and fits_kept_rows(*x.shape)
    if not is_kept:
        x = jnp.pad(x, ((0, -num_rows % 8), (0, 0)))
    plan = make_plan(
        x.shape, weights, transposed, "share" if is_kept else "nothing", tuning, interpret
    )
    (sums,) = launch(plan, WholeRows() if is_kept else None, [x], weights, layer, interpret)
    return sums[:, :num_rows]


def check_product(
    name: str, x_shape: tuple[int, ...], dtype: DTypeLike, weights: jax.Array, transposed: bool
) -> None:
    """Refuse a product that the kernel does not make.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    if dtype != weights.dtype:
        raise ValueError(f"{name} and weights must have one dtype; got {dtype} and {weights.dtype}")
    refusal = _refusal(x_shape, weights.shape, dtype, transposed)
    if refusal is not None:
        raise ValueError(refusal)


def make_plan(
    x_shape: tuple[int, ...],
    weights: jax.Array,
    transposed: bool,
    kept: Kept,
    tuning: ProductTuningConfig | None,
    interpret: Any,
) -> ProductPlan:
    """Static numbers of a product of x [S, K]; the tuning of the table, if none is given.

    Raises:
      ValueError: no tile of the tuning fits.
    """
    rows, depth = x_shape
    columns = weights.shape[1 if transposed else 2]
    if tuning is None:
        padded = rows + -rows % 8
        tuning = product_tuning(gpu_kind(), padded, depth, columns, transposed)
    return ProductPlan(
        schedule=make_schedule(rows, depth, columns, transposed, tuning, kept),
        rows=rows,
        depth=depth,
        columns=columns,
        transposed=transposed,
        dtype=weights.dtype,
        is_interpreted=interpret is not None,
    )


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
