"""The fused operations in jnp: for CPUs, for GPUs without Mosaic, and as the kernels' meaning."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fused.fused_inputs import (
    Activation,
    check_gate_up_inputs,
    check_rotary_inputs,
    check_shape,
    check_sum,
    total,
)

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}

# (pages, layer, slots, new) -> pages: one of pallas_kernels.fused.kv_write
WritePages = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    gains: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    gain_offset: float = 0.0,
    delta_gains: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `pallas_kernels.fused.add_norm.add_norm`, for any float type."""
    check_shape("gains", gains, (None, x.shape[1]))
    if delta is not None:
        check_sum("delta", delta, x.shape[1], x.dtype)
        delta = total(delta, 2, x.dtype)
        if delta_gains is not None:
            delta = _norm(delta, delta_gains[layer[0]], eps, gain_offset)
        x = x + delta
    elif delta_gains is not None:
        raise ValueError("delta_gains must come with a delta; got None")
    return x, _norm(x, gains[layer[0]], eps, gain_offset)


def rotary_write(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    cache_layer: jax.Array,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_kv_heads: int,
    head_dim: int,
    write: WritePages,
    bias: jax.Array | None = None,
    q_gains: jax.Array | None = None,
    k_gains: jax.Array | None = None,
    eps: float = 0.0,
    gain_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `pallas_kernels.fused.rotary_write.rotary_write`, for any float type.

    `write` is one of `pallas_kernels.fused.kv_write`: `write_by_loop` (CPUs) or `write_by_scatter`.
    """
    group = check_rotary_inputs(
        qkv, k_pages, v_pages, slots, (cos, sin), bias, (q_gains, k_gains), num_kv_heads, head_dim
    )
    whole = total(qkv, 2, k_pages.dtype)
    if bias is not None:
        whole = whole + bias[layer[0]]
    T, stored = slots.shape[0], k_pages.shape[4]
    heads = whole.reshape(T, num_kv_heads, group + 2, head_dim)
    q, k, v = heads[:, :, :-2].reshape(T, -1, head_dim), heads[:, :, -2], heads[:, :, -1]
    if q_gains is not None and k_gains is not None:
        q = _norm(q, q_gains[layer[0]], eps, gain_offset)
        k = _norm(k, k_gains[layer[0]], eps, gain_offset)
    q, k = (rotate(x, cos[:, None], sin[:, None]) for x in (q, k))
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, stored - head_dim))) for x in (q, k, v))
    return q, write(k_pages, cache_layer, slots, k), write(v_pages, cache_layer, slots, v)


def gated_activation(
    gate_up: jax.Array,
    *,
    activation: Activation,
    dtype: DTypeLike,
) -> jax.Array:
    """As `pallas_kernels.fused.gated_activation.gated_activation`, for any float type."""
    check_gate_up_inputs(gate_up, activation, dtype)
    gate, up = jnp.split(total(gate_up, 2, dtype), 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


def _norm(x: jax.Array, gain: jax.Array, eps: float, gain_offset: float) -> jax.Array:
    """RMSNorm over the last axis, statistics in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * (gain_offset + gain.astype(jnp.float32))).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate [T, heads, head_dim]; dimension i pairs with i + rotary_dim / 2."""
    half = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)
