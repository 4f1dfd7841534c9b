"""Gumbel noise by counting: the same number for a row's key and an index, in any program."""

import jax
import jax.numpy as jnp
from jax import lax

SERIES_BELOW = 1 / 32
"""Below it -log2(1 - w) is summed as a series, since 1 - w would lose the digits of w."""


def row_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Key of each row's noise, `fold_in(key(seed), position)`.

    Args:
      seeds: uint32[S, 2], high and low word.
      positions: int32[S].

    Returns:
      int32[S, 2], two words of bits.
    """

    def one_row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return lax.bitcast_convert_type(jax.vmap(one_row)(seeds, positions), jnp.int32)


def gumbel_noise(index: jax.Array, first_word: jax.Array, second_word: jax.Array) -> jax.Array:
    """Gumbel noise in base 2, less a constant: `-log2(e)` for exponentially distributed e.

    The largest x + noise (x = log2 of a weight) stands at each index in proportion to the weights
    (Gumbel-max). All numbers are finite, and a winner's digits are those of a 31-bit uniform
    number near 0, not of a 24-bit one near 1.

    Args:
      index: int32 of any shape, which number of the row.
      first_word: int32, of the row's key.
      second_word: int32.

    Returns:
      float32 in index's shape, from -4.7 to 31.5.
    """
    bits = _mix(index, first_word, second_word)
    uniform = _shift(bits, 1).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    # -log2(1 - w) = (w + w^2 / 2 + w^3 / 3 + w^4 / 4 + ...) / ln 2
    sum_ = uniform * 0.36067376022 + 0.48089834696
    sum_ = uniform * (uniform * (uniform * sum_ + 0.72134752044) + 1.44269504089)
    exact = -jnp.log2(jnp.maximum(1.0 - uniform, 2.0**-26))
    return -jnp.log2(jnp.where(uniform < SERIES_BELOW, sum_, exact))


def _mix(index: jax.Array, first_word: jax.Array, second_word: jax.Array) -> jax.Array:
    """Hash int32 words: `triple32` (C. Wellons 2018) that takes in a word on its way.

    Its last shift would only change bits that a float32 of the whole word does not hold.
    """
    bits = index ^ first_word
    bits = (bits ^ _shift(bits, 17)) * (0xED5AD4BB - 2**32)
    bits = (bits ^ _shift(bits, 11)) * (0xAC4C1B51 - 2**32) + second_word
    return (bits ^ _shift(bits, 15)) * 0x31848BAB


def _shift(bits: jax.Array, count: int) -> jax.Array:
    return lax.shift_right_logical(bits, jnp.full_like(bits, count))
