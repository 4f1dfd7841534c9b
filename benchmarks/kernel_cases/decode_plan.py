"""Plan of decode attention: time that making it adds to a chain of kernels, once a step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases.products import best_seconds
from pallas_kernels.attention.decode_plan import plan_decode

MAX_TOKENS = 4096
LONGEST_CONTEXT = 1000
PLANS_A_ROUND, ROUNDS = 10, 5
ROWS = (8, 64, 256, 1024)
# suffix of the name -> options of the plan
OPTIONS: dict[str, dict[str, int]] = {
    "": {},
    " window 300": {"sliding_window": 300},
    " split_tokens 256": {"split_tokens": 256},
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> timing."""
    return {
        f"plan time {rows} rows{suffix}": functools.partial(time_plan, rows, options)
        for suffix, options in OPTIONS.items()
        for rows in ROWS
    }


def time_plan(num_rows: int, options: dict[str, int]) -> dict[str, Any]:
    """Plans of random contexts, each of which waits for the one before."""
    lens = np.random.default_rng(num_rows).integers(1, LONGEST_CONTEXT + 1, num_rows)
    return {"microseconds": round(seconds_a_plan(jnp.asarray(lens, jnp.int32), options) * 1e6, 2)}


def seconds_a_plan(lens: jax.Array, options: dict[str, int]) -> float:
    """Time with plans less the time of the same chain without.

    Between two plans stands a kernel that adds 0 to the lengths [S], made of the plan's last
    numbers so that XLA cannot know it.
    """

    def plan(lens: jax.Array) -> tuple[jax.Array, ...]:
        made = plan_decode(
            lens,
            num_kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
            max_tokens=MAX_TOKENS,
            **options,
        )
        return made.segments, made.shares, made.counters

    def chain(with_plans: bool, lens: jax.Array) -> jax.Array:
        def one_round(_: Any, carried: Any) -> Any:
            lens, made = carried
            for _ in range(PLANS_A_ROUND):
                made = plan(lens) if with_plans else made
                lens, made = lax.optimization_barrier((lens, made))
                lens = lens + sum(jnp.minimum(numbers[-1, -1], 0) for numbers in made)
                lens, made = lax.optimization_barrier((lens, made))
            return lens, made

        nothing = tuple(jnp.zeros(a.shape, a.dtype) for a in jax.eval_shape(plan, lens))
        return lax.fori_loop(0, ROUNDS, one_round, (lens, nothing))[0]

    with_plans, without = (
        best_seconds(jax.jit(functools.partial(chain, is_full)), lens) for is_full in (True, False)
    )
    return (with_plans - without) / (ROUNDS * PLANS_A_ROUND)
