"""Products by XLA, and by the kernels that read a slice of a stack in place."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from models.layer_slice import LayerSlice
from pallas_kernels.fused.fused_inputs import Activation
from pallas_kernels.products import gated_product, skinny_product

MAX_SKINNY_ROWS = 64
MAX_SKINNY_BYTES = 32 << 20
"""Up to so many rows and bytes of a weight, a product is the skinny kernel's, which reads its slice
of a stack of layers in place; XLA's are faster beyond (docs/performance.md)."""
MIN_ROWS_OF_LARGE, MAX_LARGE_SKINNY_BYTES = 32, 128 << 20
"""Of so many rows, XLA splits K of larger weights, too, and sums up in a kernel of its own; the
skinny kernel leaves that to the next one."""
MIN_GATED_ROWS = 8
MIN_GATED_ROWS_OF_SMALL, MIN_GATED_ROWS_AT_ONCE = 2048, 64
"""From so many rows on, gate and up are multiplied and gated in one kernel; where they are not
larger than MAX_SKINNY_BYTES, it has enough tiles for all multiprocessors from the second on, and
from the third on if narrow tiles all run at the same time (`gated_product.runs_at_once`)."""


def product_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Float32 models multiply in full float32 on every device (GPUs default to TF32)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def multiply(x: jax.Array, weight: LayerSlice, num_in_dims: int) -> jax.Array:
    """A product by XLA, which flattens what is fused, but after it has split it over a mesh.

    Flattened here, gate and up `[D, 2, F]` would be gathered whole on every device, since a
    matrix `[D, 2 * F]` cannot say that it is split over F alone.

    Args:
      x: [T, *in_dims].
      weight: [*in_dims, *out_dims].
      num_in_dims: how many axes are contracted.

    Returns:
      [T, *out_dims] in x's dtype.
    """
    in_size = math.prod(weight.shape[:num_in_dims])
    return jnp.tensordot(
        x.reshape(x.shape[0], in_size),
        weight[...].reshape(in_size, *weight.shape[num_in_dims:]),
        axes=1,
        precision=product_precision(weight.dtype),
    )


def skinny_or_multiply(x: jax.Array, weight: LayerSlice, num_in_dims: int) -> jax.Array:
    """Few rows by the skinny kernel, a sum of [T, *out_dims]; more by XLA."""
    stack = weight.matrices(num_in_dims)
    flat = x.reshape(x.shape[0], stack.shape[1])
    fits = skinny_product.fits_skinny_product(flat.shape, stack.shape, x.dtype, transposed=False)
    is_large = x.shape[0] >= MIN_ROWS_OF_LARGE
    max_bytes = MAX_LARGE_SKINNY_BYTES if is_large else MAX_SKINNY_BYTES
    if x.shape[0] > MAX_SKINNY_ROWS or weight.num_bytes > max_bytes or not fits:
        return multiply(x, weight, num_in_dims)
    parts = skinny_product.skinny_product(flat, stack, weight.layer)
    return parts.reshape(*parts.shape[:2], *weight.shape[num_in_dims:])


def fits_gated_up(x: jax.Array, weight: LayerSlice) -> bool:
    """Whether `multiply_and_gate` takes x [T, D] and gate and up [D, 2, F], and should."""
    rows = x.shape[0]
    if weight.num_bytes > MAX_SKINNY_BYTES:
        should = rows >= MIN_GATED_ROWS
    else:
        at_once = gated_product.runs_at_once(rows, weight.shape[-1])
        should = rows >= (MIN_GATED_ROWS_AT_ONCE if at_once else MIN_GATED_ROWS_OF_SMALL)
    return should and gated_product.fits_gated_product(
        x.shape, weight.matrices().shape, weight.dtype
    )


def multiply_and_gate(x: jax.Array, weight: LayerSlice, *, activation: Activation) -> jax.Array:
    """`activation(x @ gate) * (x @ up)`, [T, F] in x's dtype, of x [T, D] and weights [D, 2, F]."""
    return gated_product.gated_product(x, weight.matrices(), weight.layer, activation=activation)
