"""Sampling: the kernel's tokens against the reference's, then time."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array
from pallas_kernels.sampling import sampling, sampling_reference, xla_sampling
from pallas_kernels.sampling.sampling_inputs import row_limits
from pallas_kernels.sampling.sampling_noise import gumbel_noise, row_keys

VOCABULARY = 151_936
FLAT, PEAKED = 0.6, 4.0
"""Standard deviations of logits: of dummy weights, and more than those of a trained model."""
BORDER, NEAR = 1e-5, 1e-4
"""A share of the weights, and a difference of scores in base 2, that rounding may decide."""
DRAWS_A_LOOP, LOOPS = 8, 10
"""Draws in a body of the device's loop, which costs some microseconds itself; and its rounds."""

# name -> (rows, vocabulary, standard deviation)
CHECKS: dict[str, tuple[int, int, float]] = {
    "flat": (64, VOCABULARY, FLAT),
    "peaked": (64, VOCABULARY, PEAKED),
    "many rows": (256, VOCABULARY, 2.0),
    "small vocabulary": (32, 300, 2.0),
    "odd vocabulary": (32, 50_257, 1.0),
    "one row": (1, 128_256, 1.0),
}
# name -> (standard deviation of the logits, temperature, top_k, top_p, min_p)
PARAMETERS: dict[str, tuple[float, float, int, float, float]] = {
    "greedy": (FLAT, 0.0, 0, 1.0, 0.0),
    "temperature": (FLAT, 0.8, 0, 1.0, 0.0),
    "top_p flat": (FLAT, 0.8, 0, 0.95, 0.0),
    "top_p peaked": (PEAKED, 0.8, 0, 0.95, 0.0),
    "top_k 50": (FLAT, 0.8, 50, 1.0, 0.0),
    "top_k 20 top_p": (FLAT, 0.6, 20, 0.95, 0.0),
    "top_k 1000": (FLAT, 0.8, 1000, 1.0, 0.0),
    "min_p top_p": (FLAT, 0.8, 0, 0.95, 0.05),
}
reference = jax.jit(sampling_reference.sample)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    checks = {f"sampling {name}": functools.partial(check, *case) for name, case in CHECKS.items()}
    times: dict[str, Callable[[], dict[str, Any]]] = {}
    for num_rows in (8, 64, 256):
        times[f"time sampling {num_rows} rows"] = functools.partial(time_draws, num_rows)
        times[f"time sampling {num_rows} rows argmax"] = functools.partial(time_argmax, num_rows)
    times["time sampling 256 rows xla"] = functools.partial(time_xla, 256)
    return checks | times


def check(num_rows: int, vocab_size: int, spread: float) -> dict[str, Any]:
    """Compare tokens of mixed parameters; others are allowed only where rounding decides."""
    rng = np.random.default_rng(vocab_size + num_rows)
    logits = spread * random_array(int(rng.integers(2**31)), (num_rows, vocab_size), "float32")
    if num_rows > 8:  # ties, and rows that are not finite
        logits = logits.at[::5].set(jnp.round(logits[::5] * 4) / 4)
        logits = logits.at[1, vocab_size // 2].set(jnp.nan).at[2, -1].set(jnp.inf)
        logits = logits.at[3].set(-jnp.inf).at[4, : vocab_size - 1].set(-jnp.inf)
    choices = ([0, 0.5, 0.8, 1, 1], [0, 0, 1, 20, 50, 100, 1000], [0.1, 0.9, 0.95, 1], [0, 0, 0.1])
    types = (np.float32, np.int32, np.float32, np.float32)
    parameters = [
        jnp.asarray(rng.choice(values, num_rows), dtype)
        for values, dtype in zip(choices, types, strict=True)
    ]
    seeds = jnp.asarray(rng.integers(0, 2**32, (num_rows, 2)), jnp.uint32)
    case = (logits, row_keys(seeds, jnp.arange(num_rows)), *parameters)
    tokens, is_finite = map(np.asarray, sampling.sample(*case))
    expected, expected_finite = map(np.asarray, reference(*case))
    xla_tokens = np.asarray(xla_sampling.sample(*case)[0])
    finite_agrees = bool((is_finite == expected_finite).all())
    differs, others = (
        np.flatnonzero((got != expected) & expected_finite) for got in (tokens, xla_tokens)
    )
    wrong = [
        row
        for row in differs.tolist()
        if not is_near(case, row, int(tokens[row]), int(expected[row]))
    ]
    return {
        "ok": finite_agrees and not wrong,
        "finite_agrees": finite_agrees,
        "wrong_rows": wrong,
        "rows_by_rounding": len(differs) - len(wrong),
        "rows_of_xla_that_differ": len(others),
        "distinct_tokens": len(set(tokens.tolist())),
    }


def is_near(case: tuple[jax.Array, ...], row: int, token: int, expected: int) -> bool:
    """Whether rounding may choose between two tokens of a row."""
    if not 0 <= token < case[0].shape[1]:
        return False
    logits, keys, *parameters = (array[row : row + 1] for array in case)
    limits = row_limits(logits, *parameters)
    x = np.asarray(logits * limits.scale[:, None], np.float64)[0]
    noise = gumbel_noise(jnp.arange(x.size), keys[:, :1], keys[:, 1:]) * limits.noise_scale[:, None]
    scores = x + np.asarray(noise, np.float64)[0]
    top_k, top_p = int(limits.top_k[0]), float(limits.top_p[0])
    kth = np.sort(x)[-top_k] if top_k else -np.inf
    floor = max(kth, x.max() + float(limits.log2_min_p[0]))
    weights = np.where(x >= floor, np.exp2(x - x.max()), 0)
    shares = [weights[x > x[one]].sum() / weights.sum() for one in (token, expected)]
    at_border = any(abs(share - top_p) < BORDER for share in shares)
    are_kept = all(x[one] >= floor for one in (token, expected))
    return are_kept and (at_border or abs(scores[token] - scores[expected]) < NEAR)


@functools.cache
def normal_logits(num_rows: int) -> jax.Array:
    """Of standard deviation 1."""
    return random_array(num_rows, (num_rows, VOCABULARY), "float32")


def timed_inputs(num_rows: int, spread: float, *values: float) -> tuple[jax.Array, ...]:
    """Logits, keys and parameters, alike for all rows."""
    logits = spread * normal_logits(num_rows)
    keys = row_keys(jnp.zeros((num_rows, 2), jnp.uint32), jnp.arange(num_rows))
    types = ("float32", "int32", "float32", "float32")
    parameters = (
        jnp.full(num_rows, value, dtype) for value, dtype in zip(values, types, strict=True)
    )
    return logits, keys, *parameters


def microseconds_a_draw(loop: Callable[..., jax.Array], inputs: tuple[jax.Array, ...]) -> float:
    """Best of three runs of a loop of LOOPS * DRAWS_A_LOOP draws."""
    loop(*inputs).block_until_ready()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        loop(*inputs).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return round(min(seconds) / (LOOPS * DRAWS_A_LOOP) * 1e6, 1)


def make_loop(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A loop on the device; each draw's tokens change the keys of the next."""

    @jax.jit
    def loop(logits, keys, *parameters):
        def body(_, keys):
            for _ in range(DRAWS_A_LOOP):
                keys = keys + draw(logits, keys, *parameters)[:, None]
            return keys

        return lax.fori_loop(0, LOOPS, body, keys)

    return loop


def time_draws(num_rows: int) -> dict[str, Any]:
    loop = make_loop(lambda *inputs: sampling.sample(*inputs)[0])
    times = {
        name: microseconds_a_draw(loop, timed_inputs(num_rows, *values))
        for name, values in PARAMETERS.items()
    }
    floor = num_rows * VOCABULARY * 4 / COPY_BYTES_PER_SECOND * 1e6
    return {"microseconds": times, "floor_of_one_pass": round(floor, 1)}


def time_argmax(num_rows: int) -> dict[str, Any]:
    def draw(logits, keys, *_):
        # The keys shift the logits by next to nothing, so that no draw is moved out of the loop.
        shift = keys[:, :1].astype(jnp.float32) * 1e-30
        return jnp.argmax(logits + shift, axis=-1).astype(jnp.int32)

    inputs = timed_inputs(num_rows, *PARAMETERS["greedy"])
    return {"microseconds": microseconds_a_draw(make_loop(draw), inputs)}


def time_xla(num_rows: int) -> dict[str, Any]:
    loop = make_loop(lambda *inputs: xla_sampling.sample(*inputs)[0])
    names = ("temperature", "top_p flat", "top_k 50")
    return {
        "microseconds": {
            name: microseconds_a_draw(loop, timed_inputs(num_rows, *PARAMETERS[name]))
            for name in names
        }
    }
