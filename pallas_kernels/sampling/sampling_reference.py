"""The plain meaning of sampling, by a sort, for tests only."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.sampling_inputs import row_limits
from pallas_kernels.sampling.sampling_noise import gumbel_noise


def sample(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The arguments and results of `xla_sampling.sample`."""
    limits = row_limits(logits, temperature, top_k, top_p, min_p)
    x = logits * limits.scale[:, None]
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    noise = gumbel_noise(index, keys[:, :1], keys[:, 1:]) * limits.noise_scale[:, None]
    kept = truncate(x, limits.top_k, limits.top_p, limits.log2_min_p)
    scores = jnp.where(kept, x + noise, -jnp.inf)
    is_finite = jnp.isfinite(logits.max(axis=-1)) & ~jnp.isnan(logits).any(axis=-1)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), is_finite


def truncate(
    x: jax.Array, top_k: jax.Array, top_p: jax.Array, log2_min_p: jax.Array
) -> jax.Array:  # fmt: skip
    """bool[S, V]: what min-p, then top-k, then top-p leave; ties at a border are kept.

    Args:
      x: float32[S, V], logarithms in base 2 of the weights.
      top_k: int32[S], 0 = off.
      top_p: float32[S], inf = off.
      log2_min_p: float32[S], -inf = off.
    """
    V = x.shape[-1]
    ordered = -jnp.sort(-x, axis=-1)
    peak = ordered[:, :1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    floor = jnp.maximum(peak + log2_min_p[:, None], kth)
    weights = jnp.where(ordered >= floor, jnp.exp2(ordered - peak), 0)
    total = weights.sum(axis=-1, keepdims=True)
    above = jnp.cumsum(weights, axis=-1) - weights
    in_nucleus = (above < top_p[:, None] * total) & (ordered >= floor)
    lowest = jnp.min(jnp.where(in_nucleus, ordered, jnp.inf), axis=-1, keepdims=True)
    return x >= lowest
