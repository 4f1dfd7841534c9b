"""What the versions of the sampler share: the checks, and the parameters as they compute with."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = 1.4426950408889634
MAX_VOCABULARY = 2**24
"""Indices and counts are exact as float32 below it."""


class RowLimits(NamedTuple):
    """The parameters of S rows; all are "off" for a greedy row.

    Attributes:
      scale: float32[S]; logits times it are logarithms in base 2 of the weights.
      noise_scale: float32[S], 0 = greedy, otherwise 1.
      top_k: int32[S], 0 = off.
      top_p: float32[S], inf = off.
      log2_min_p: float32[S], -inf = off.
    """

    scale: jax.Array
    noise_scale: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    log2_min_p: jax.Array


def row_limits(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> RowLimits:
    """Check float32[S, V] logits and the parameters [S]; turn off what does nothing.

    Raises:
      ValueError: dtype or shapes.
    """
    if logits.dtype != jnp.float32 or logits.ndim != 2:
        raise ValueError(
            f"logits must be float32[S, V]; got {logits.dtype}{list(logits.shape)}"
        )  # fmt: skip
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size < MAX_VOCABULARY:
        raise ValueError(f"vocabulary must be from 1 to {MAX_VOCABULARY - 1}; got {vocab_size}")
    for name, values in (
        ("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p),
    ):  # fmt: skip
        if values.shape != (num_rows,):
            raise ValueError(f"{name} must be of {num_rows} rows; got {list(values.shape)}")
    is_greedy = temperature == 0
    # A greedy row is not scaled: the product could make equals of two logits.
    scale = jnp.where(is_greedy, 1.0, LOG2_E / jnp.where(is_greedy, 1.0, temperature))
    return RowLimits(
        scale=scale,
        noise_scale=jnp.where(is_greedy, 0.0, 1.0),
        top_k=jnp.where(is_greedy | (top_k >= vocab_size) | (top_k < 0), 0, top_k),
        top_p=jnp.where(is_greedy | (top_p >= 1), jnp.inf, top_p),
        log2_min_p=jnp.where(is_greedy, -jnp.inf, jnp.log2(min_p)),
    )


def to_ordered(values: jax.Array) -> jax.Array:
    """Map float32 to int32 so that the order is kept (-0.0 stands before 0.0)."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def from_ordered(ordered: jax.Array) -> jax.Array:
    """Undo `to_ordered`."""
    bits = jnp.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """int32 mean, rounded down, without overflow."""
    return (low & high) + jax.lax.shift_right_arithmetic(low ^ high, jnp.ones_like(low))
