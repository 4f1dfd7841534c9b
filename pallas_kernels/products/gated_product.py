"""Product with gate and up, and the gated activation of it, in one kernel (Hopper).

`gate_product.py` is the other way round: there the gate comes before the product.
"""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.fused.fused_inputs import Activation
from pallas_kernels.products.gated_product_kernel import (
    BLOCK_K,
    COLUMN_TILES,
    STORED_COLUMNS,
    GatedProductPlan,
    GatedProductTuning,
    launch,
)

_DTYPES = (jnp.bfloat16, jnp.float16)
_ROW_MULTIPLE = 8
# Smallest first: 64 rows x 64 columns, 128 x 64.
_NARROW_TILES = [GatedProductTuning(column_tile=64, warpgroups=count) for count in (1, 2)]
_WIDE_TILES = GatedProductTuning()  # 128 x 128
_NARROW_ROUND = 0.53
"""Time of a 128 x 64 tile in times of a wide one: 512 rows of Llama-3-8B take 161.9 us in 7 rounds
of the former, 174.8 in 4 of the latter, 256 rows 93.3 and 87.6 us (one H200)."""


@functools.partial(jax.jit, static_argnames=("activation", "interpret", "tuning"))
def gated_product(
    x: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    activation: Activation,
    interpret: Any = None,
    tuning: GatedProductTuning | None = None,
) -> jax.Array:
    """Multiply by one layer's gate and up, and multiply the activated gate with up.

    Gate and up stay in float32 registers until their product is rounded, once.

    Args:
      x: [T, D] bfloat16 or float16; D a multiple of 64. Only where T is no multiple of 8 are x and
        the result copied.
      weights: [L, D, 2 * F] in x's dtype, the gate first; F a multiple of 64, at least 128. No
        layer is copied.
      layer: [1] int32, which layer to read.
      activation: "silu", or "gelu_tanh" (GELU by its tanh approximation).
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = those of `default_tuning`.

    Returns:
      [T, F] in x's dtype: `activation(x @ gate) * (x @ up)`.

    Raises:
      ValueError: shapes or dtypes do not fit, or the activation is unknown.
    """
    if activation not in get_args(Activation):
        known = " or ".join(get_args(Activation))
        raise ValueError(f"activation must be {known}; got {activation!r}")
    if x.dtype != weights.dtype:
        raise ValueError(f"x and weights must have one dtype; got {x.dtype} and {weights.dtype}")
    refusal = _refusal(x.shape, weights.shape, x.dtype)
    if refusal is not None:
        raise ValueError(refusal)
    num_rows, depth = x.shape
    if num_rows % _ROW_MULTIPLE:
        x = jnp.pad(x, ((0, -num_rows % _ROW_MULTIPLE), (0, 0)))
    width = weights.shape[2] // 2
    plan = GatedProductPlan(
        rows=x.shape[0],
        depth=depth,
        width=width,
        activation=activation,
        dtype=x.dtype,
        tuning=tuning or default_tuning(num_rows, width),
    )
    return launch(plan, x, weights, layer, interpret)[:num_rows]


def fits_gated_product(
    x_shape: tuple[int, ...], weights_shape: tuple[int, ...], dtype: DTypeLike
) -> bool:
    """Whether `gated_product` takes x [T, D] and weights [L, D, 2 * F] of this dtype."""
    return _refusal(x_shape, weights_shape, dtype) is None


def default_tuning(rows: int, width: int) -> GatedProductTuning:
    """Sizes of the kernel for x [rows, D] and an output of `width` columns.

    Small tiles move more bytes for a product, but more multiprocessors share them: the smallest
    ones serve of which all run at the same time. Where the narrow ones are too many for that, wide
    ones keep most multiprocessors busy, unless too few are left for the last round.
    """
    for tuning in _NARROW_TILES:
        if _rounds(rows, width, tuning) == 1:
            return tuning
    narrow_rounds = _rounds(rows, width, _NARROW_TILES[-1])
    is_narrow_faster = narrow_rounds * _NARROW_ROUND < _rounds(rows, width, _WIDE_TILES)
    return _NARROW_TILES[-1] if is_narrow_faster else _WIDE_TILES


def _rounds(rows: int, width: int, tuning: GatedProductTuning) -> int:
    """Tiles of the thread block that has most."""
    tiles = pl.cdiv(rows, tuning.row_tile) * pl.cdiv(width, tuning.column_tile)
    return pl.cdiv(tiles, tuning.programs)


def runs_at_once(rows: int, width: int) -> bool:
    """Whether narrow tiles of an output [rows, width] all run at the same time.

    Where they do, `default_tuning` takes them, and small weights are multiplied faster than by XLA
    and a kernel for the gate: [256, 1024] by [1024, 2 * 3072] in 9.0 instead of 12.9 us.
    """
    return any(_rounds(rows, width, tuning) == 1 for tuning in _NARROW_TILES)


def _refusal(
    x_shape: tuple[int, ...], weights_shape: tuple[int, ...], dtype: DTypeLike
) -> str | None:
    """Why the kernel does not take arrays; None where it does."""
    if jnp.dtype(dtype) not in _DTYPES:
        return f"x must be bfloat16 or float16; got {jnp.dtype(dtype).name}"
    if len(x_shape) != 2 or len(weights_shape) != 3 or x_shape[1] != weights_shape[1]:
        return f"x must be [T, D] and weights [L, D, 2 * F]; got {x_shape} and {weights_shape}"
    rows, depth = x_shape
    width, rest = divmod(weights_shape[2], 2)
    if not rows:
        return "x must have at least 1 row; got 0"
    min_width = max(COLUMN_TILES)
    if not depth or depth % BLOCK_K or rest or width < min_width or width % STORED_COLUMNS:
        return (
            f"D must be a multiple of {BLOCK_K}, and F of {STORED_COLUMNS} and at least "
            f"{min_width}; got {depth} and {width}"
        )
    return None
