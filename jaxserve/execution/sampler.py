"""The sampler: logits and rows of the device state to tokens, all rows in one pure function."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.execution.sample_mode import SampleMode

NUM_TOP_LOGPROBS = 20
"""Log-probabilities that the device returns for a row; `max_logprobs` cannot exceed it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What the sampler needs of S rows.

    Attributes:
      seeds: uint32[S, 2], high and low word.
      positions: int32[S], index in the sequence of the token to be sampled.
      temperature: float32[S], 0 = greedy.
      top_k: int32[S], 0 = off.
      top_p: float32[S], 1 = off.
      min_p: float32[S], 0 = off.
      stop_ids: int32[S, E], -1 = unused.
      forbids_stop: bool[S], True while fewer than min_tokens were sampled.
    """

    seeds: jax.Array
    positions: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    stop_ids: jax.Array
    forbids_stop: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """Log-probabilities of the raw logits.

    Attributes:
      chosen: float32[S].
      rank: int32[S], 1 = most likely.
      top_values: float32[S, NUM_TOP_LOGPROBS], descending.
      top_ids: int32 of the same shape.
    """

    chosen: jax.Array
    rank: jax.Array
    top_values: jax.Array
    top_ids: jax.Array


def sample_tokens(logits: jax.Array, rows: SamplingRows, mode: SampleMode) -> jax.Array:
    """Draw one token a row.

    A row's token depends on its logits, seed and position only, not on the other rows.

    Args:
      logits: float32[S, V].
      rows: parameters.
      mode: static; how much of the parameters is used by any row.

    Returns:
      int32[S].
    """
    if mode == SampleMode.FULL:
        logits = forbid_stop_ids(logits, rows.stop_ids, rows.forbids_stop)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode == SampleMode.GREEDY:
        return greedy
    is_greedy = rows.temperature == 0
    scaled = logits / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
    if mode >= SampleMode.TRUNCATED:
        scaled = truncate(scaled, rows.top_k, rows.top_p, rows.min_p)
    noise = gumbel_noise(rows.seeds, rows.positions, logits.shape[-1])
    drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, greedy, drawn)


def forbid_stop_ids(logits: jax.Array, stop_ids: jax.Array, forbids: jax.Array) -> jax.Array:
    """Set the logits of int32[S, E] ids to -inf in the rows of bool[S]."""
    S, V = logits.shape
    ids = jnp.where(forbids[:, None] & (stop_ids >= 0), stop_ids, V)
    return logits.at[jnp.arange(S)[:, None], ids].set(-jnp.inf, mode="drop")


def gumbel_noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """float32[S, V]: noise of each row's own key, `fold_in(key(seed), position)`."""

    def one_row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(one_row)(seeds, positions)


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set to -inf what min-p, then top-k, then top-p drop; ties at a border are kept.

    top-p keeps the fewest most likely tokens whose probabilities, renormalised after min-p and
    top-k, sum to at least `top_p` (Holtzman et al. 2020). This is the plain meaning, by a sort.

    Args:
      logits: float32[S, V], already divided by temperature.
      top_k: int32[S].
      top_p: float32[S].
      min_p: float32[S].
    """
    V = logits.shape[-1]
    peak = jnp.max(logits, axis=-1, keepdims=True)
    floor = peak + jnp.log(min_p)[:, None]
    ordered = -jnp.sort(-logits, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    floor = jnp.maximum(floor, kth)
    kept = jnp.where(ordered >= floor, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    in_nucleus = ((before < top_p[:, None]) | (top_p >= 1)[:, None]) & (kept > -jnp.inf)
    nucleus_floor = jnp.min(jnp.where(in_nucleus, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.maximum(floor, nucleus_floor), logits, -jnp.inf)


def top_logprobs(logits: jax.Array, tokens: jax.Array) -> TopLogprobs:
    """Log-probabilities of int32[S] chosen tokens and of the most likely ones, from raw logits."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    num_top = min(NUM_TOP_LOGPROBS, logits.shape[-1])
    top_values, top_ids = jax.lax.top_k(logprobs, num_top)
    missing = ((0, 0), (0, NUM_TOP_LOGPROBS - num_top))
    return TopLogprobs(
        chosen=chosen[:, 0],
        rank=1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32),
        top_values=jnp.pad(top_values, missing, constant_values=-jnp.inf),
        top_ids=jnp.pad(top_ids, missing),
    )
