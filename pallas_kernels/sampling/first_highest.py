"""first_highest: a maximum and its first place in one pass, in plain XLA."""

import jax
import jax.numpy as jnp


def first_highest(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest value of each row, NaN if it has one, and the lowest index that has it.

    One pass over both, where a maximum beside an argmax is two.

    Args:
      values: float32[S, N].
      indices: int32[S, N].

    Returns:
      float32[S] and int32[S]; of a row with a NaN the index is that of one of its values.
    """

    def better(one, other):
        (value, index), (other_value, other_index) = one, other
        is_higher = (value > other_value) | jnp.isnan(value)
        is_first = is_higher | ((value == other_value) & (index < other_index))
        return jnp.where(is_higher, value, other_value), jnp.where(is_first, index, other_index)

    return jax.lax.reduce((values, indices), (-jnp.inf, 0), better, (1,))
