"""What one or a few rows do in one kernel.

Products with the norm or the gate before them; attention with the rotary embedding and the write.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.kv_cache import CacheGeometry
from models.layer_slice import LayerSlice
from pallas_kernels.attention import one_row_attention
from pallas_kernels.fused.fused_inputs import Activation
from pallas_kernels.products import gate_product, norm_product

MAX_FUSED_ROWS = 1
"""Up to so many rows: every thread block of a product makes the norm or the gate of each, which
pays for more of them only in small models (docs/performance.md). Attention goes with products."""
MAX_FUSED_CONTEXT = 2048
"""Tokens up to which one kernel writes and attends; two are faster with more of them."""
MAX_FUSED_BYTES = 256 << 20
"""Of a weight; larger ones were not measured (docs/performance.md)."""


def fits_norm(x: jax.Array, weight: LayerSlice) -> bool:
    """Whether `multiply_normed` takes x [T, D] and a weight [D, *out_dims]."""
    return _is_small(x.shape[0], weight) and norm_product.fits_norm_product(
        x.shape, weight.matrices().shape, x.dtype
    )


def multiply_normed(
    x: jax.Array,
    delta: jax.Array | None,
    gains: LayerSlice,
    weight: LayerSlice,
    *,
    eps: float,
    gain_offset: float,
) -> tuple[jax.Array, jax.Array]:
    """`x + delta` for a sum delta, and a sum of [T, *out_dims]: the product of its norm."""
    x, parts = norm_product.norm_product(
        x,
        delta,
        gains.stack,
        gains.layer,
        weight.matrices(),
        weight.layer,
        eps=eps,
        gain_offset=gain_offset,
    )
    return x, parts.reshape(*parts.shape[:2], *weight.shape[1:])


def fits_gate(gate_up: jax.Array, weight: LayerSlice, dtype: jnp.dtype) -> bool:
    """Whether `multiply_gated` takes a sum of [T, 2, F] and a weight [F, D]."""
    rows, _, width = gate_up.shape[-3:]
    return _is_small(rows, weight) and gate_product.fits_gate_product(
        (rows, width), weight.stack.shape, dtype
    )


def multiply_gated(gate_up: jax.Array, weight: LayerSlice, *, activation: Activation) -> jax.Array:
    """A sum of [T, 2, F] to a sum of [T, D]: the product of `activation(gate) * up`."""
    flat = gate_up.reshape(*gate_up.shape[:-2], -1)
    return gate_product.gate_product(flat, weight.stack, weight.layer, activation=activation)


def fits_heads(
    num_query_heads: int, head_dim: int, rotary_dim: int, geometry: CacheGeometry
) -> bool:
    """Whether `attention` takes so many query heads a KV head, of few rows and short contexts."""
    return one_row_attention.fits_rotary_decode(
        num_query_heads,
        head_dim,
        rotary_dim,
        geometry.stored_head_dim,
        geometry.page_size,
        geometry.dtype,
    )


def fits_attention(
    qkv: jax.Array, page_table: jax.Array, rotary_dim: int, geometry: CacheGeometry
) -> bool:
    """Whether `attention` takes a sum of [T, K, G + 2, H], one token a row, and such pages."""
    rows, _, heads, head_dim = qkv.shape[-4:]
    context = page_table.shape[1] * geometry.page_size
    if geometry.sliding_window is not None:
        context = min(context, geometry.sliding_window)
    is_small = rows <= MAX_FUSED_ROWS and context <= MAX_FUSED_CONTEXT
    return is_small and fits_heads(heads - 2, head_dim, rotary_dim, geometry)


def attention(page_table: jax.Array, seq_lens: jax.Array, **options: Any) -> Callable[..., Any]:
    """A kernel in the place of `rotary_write` whose queries are attended already.

    Args:
      page_table: int32[S, max_pages].
      seq_lens: int32[S].
      options: `scale`, `sliding_window` and `soft_cap` of the decode kernel.
    """
    return functools.partial(
        one_row_attention.rotary_decode, page_table=page_table, seq_lens=seq_lens, **options
    )


def _is_small(rows: int, weight: LayerSlice) -> bool:
    return rows <= MAX_FUSED_ROWS and weight.num_bytes <= MAX_FUSED_BYTES
