"""What the cases share: random arrays, and timing by loops on the device."""

import time
from collections.abc import Callable

import jax
from jax import lax

COPY_BYTES_PER_SECOND = 4.3e12
"""Measured ceiling of an H200, read + write."""


def random_array(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Standard normal numbers."""
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype))(jax.random.key(seed))


def seconds_a_call(
    call: Callable[..., jax.Array],
    carried: jax.Array,
    *others: jax.Array,
    calls: int,
    layers: int,
) -> float:
    """Best of three loops on the device of `carried = call(carried, int32[1] layer, *others)`.

    Calls take turns over `layers`, so that L2 cannot serve what a call reads.
    """

    @jax.jit
    def loop(carried, *others):
        def body(index, carried):
            return call(carried, (index % layers)[None], *others)

        return lax.fori_loop(0, calls, body, carried)

    loop(carried, *others).block_until_ready()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        loop(carried, *others).block_until_ready()
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)
