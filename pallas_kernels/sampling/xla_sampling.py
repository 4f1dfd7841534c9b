"""Sampling in plain XLA, for CPUs and for GPUs without a Mosaic kernel; no sort."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.sampling_inputs import (
    RowLimits,
    from_ordered,
    middle,
    row_limits,
    to_ordered,
)
from pallas_kernels.sampling.sampling_noise import gumbel_noise


@jax.jit
def sample(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row; a row's token depends on nothing of other rows.

    Kept are the tokens that min-p, then top-k, then top-p leave; ties at a border are kept.
    top-p keeps the fewest most likely tokens whose probabilities, renormalised after min-p and
    top-k, sum to at least `top_p`. The best of all tokens with their noise is drawn; while it is
    none of the kept ones, nothing at or below its logit is, and the best above it is drawn.

    Args:
      logits: float32[S, V].
      keys: int32[S, 2], of each row's noise (`sampling_noise.row_keys`).
      temperature: float32[S], 0 = the most likely token, the first one of equals.
      top_k: int32[S], 0 = off.
      top_p: float32[S], 1 = off.
      min_p: float32[S], 0 = off.

    Returns:
      tokens int32[S], and bool[S]: the row has no NaN, and its highest logit is finite. Other
      rows have any token.

    Raises:
      ValueError: dtype or shapes.

    Source: Gumbel-max (Gumbel 1954); Holtzman et al. 2020 (top-p).
    """
    limits = row_limits(logits, temperature, top_k, top_p, min_p)
    is_finite = finite_rows(logits)
    # Behind the barrier x is computed once: fusions that compute it anew may differ in a bit.
    x = lax.optimization_barrier(logits * limits.scale[:, None])
    peak = jnp.max(x, axis=-1)
    floor = jnp.maximum(peak + limits.log2_min_p, _kth_highest(x, limits.top_k, is_finite))
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    noise = gumbel_noise(index, keys[:, :1], keys[:, 1:])
    is_allowed = x >= floor[:, None]
    scores = jnp.where(is_allowed, x + noise * limits.noise_scale[:, None], -jnp.inf)
    weights = jnp.where(is_allowed, jnp.exp2(x - peak[:, None]), 0)
    tokens = _draw(x, scores, weights, limits, is_finite)
    return tokens, is_finite


def finite_rows(logits: jax.Array) -> jax.Array:
    """bool[S]: rows of float32[S, V] without NaN whose highest logit is finite."""
    # XLA's maximum on a CPU passes over most NaN (jax 0.11.2), so they become infinite.
    return jnp.isfinite(jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1))


def _draw(
    x: jax.Array, scores: jax.Array, weights: jax.Array, limits: RowLimits, is_finite: jax.Array
) -> jax.Array:
    """The best score of each row within its top-p."""
    enough = limits.top_p * weights.sum(axis=-1)

    def draw(state):
        pivot, tokens, is_done = state
        left = jnp.where(x > pivot[:, None], scores, -jnp.inf)
        is_done |= left.max(axis=-1) == -jnp.inf  # each round raises the pivot, or is the last
        best = jnp.argmax(left, axis=-1).astype(jnp.int32)
        tokens = jnp.where(is_done, tokens, best)
        value = jnp.take_along_axis(x, tokens[:, None], axis=-1)
        above = jnp.where(x > value, weights, 0).sum(axis=-1)
        # Without the last term a sum that is rounded could drop the peak, and end nowhere.
        is_kept = (above < enough) | (above == 0)
        return value[:, 0], tokens, is_done | is_kept

    num_rows = x.shape[0]
    start = (jnp.full(num_rows, -jnp.inf), jnp.zeros(num_rows, jnp.int32), ~is_finite)
    return lax.while_loop(lambda state: ~state[2].all(), draw, start)[1]


def _kth_highest(x: jax.Array, top_k: jax.Array, is_finite: jax.Array) -> jax.Array:
    """float32[S]: what exactly the `top_k` highest of a row and their equals reach; -inf = all.

    Rows that are not finite are not searched: 1 above a NaN may be the lowest integer.
    """
    num_rows = x.shape[0]

    def search(state):
        # At least k reach `low`, fewer reach `high`.
        low, high, is_done = state
        threshold = middle(low, high)
        count = (x >= from_ordered(threshold)[:, None]).sum(axis=-1, dtype=jnp.int32)
        low = jnp.where(~is_done & (count >= top_k), threshold, low)
        high = jnp.where(~is_done & (count < top_k), threshold, high)
        return low, high, is_done | (count == top_k) | (middle(low, high) == low)

    low = jnp.full(num_rows, to_ordered(jnp.float32(-jnp.inf)), jnp.int32)
    high = to_ordered(jnp.max(x, axis=-1)) + 1
    start = (low, high, (top_k == 0) | ~is_finite)
    low, _, _ = lax.while_loop(lambda state: ~state[2].all(), search, start)
    return from_ordered(low)
