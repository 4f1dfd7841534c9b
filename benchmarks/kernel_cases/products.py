"""Products of few rows: agreement with XLA's product, then time in a chain of kernels."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array
from pallas_kernels.platform import gpu_kind
from pallas_kernels.products.product_schedule import make_schedule
from pallas_kernels.products.product_tuning import ProductTuningConfig, product_tuning
from pallas_kernels.products.skinny_product import skinny_product

TOLERANCE = 1e-3  # sums of equal products of bfloat16, in another order
ROTATED_BYTES = 200e6  # of weights that calls take turns over, so that L2 cannot serve them
ROUNDS = 4  # turns over all layers in one timed loop

# name -> (K, N, transposed)
SHAPES = {
    "8b qkv": (4096, 6144, False),
    "8b o": (4096, 4096, False),
    "0.6b qkv": (1024, 4096, False),
    "0.6b o": (2048, 1024, False),
    "0.6b gate up": (1024, 6144, False),
    "0.6b down": (3072, 1024, False),
    "0.6b head": (1024, 151936, True),
}
# name -> (shape, rows, changes of the tuning)
CHECKS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "8b qkv": ("8b qkv", (8, 13, 128), {}),
    "8b o": ("8b o", (8, 16, 64), {}),
    "0.6b qkv": ("0.6b qkv", (8, 64), {}),
    "0.6b o": ("0.6b o", (8, 64), {}),
    "0.6b gate up": ("0.6b gate up", (8, 64), {}),
    "0.6b down": ("0.6b down", (8, 64), {}),
    "0.6b head": ("0.6b head", (8, 64), {}),
    "block_n 256": ("0.6b gate up", (64,), {"block_n": 256}),
    "uneven shares": ("8b qkv", (8,), {"num_processors": 107}),
}
TIMED = [name for name in SHAPES if name != "0.6b head"]


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing; "product check" or "product time" chooses a kind."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"product check {title}": functools.partial(check, SHAPES[name], rows, changes)
        for title, (name, rows, changes) in CHECKS.items()
    }
    for name in TIMED:
        for rows in (8, 64):
            found[f"product time {name} {rows} rows"] = functools.partial(
                time_product, SHAPES[name], rows
            )
    return found


def tuned(shape: tuple[int, int, bool], rows: int, changes: dict[str, Any]) -> ProductTuningConfig:
    """The table's config with changes."""
    padded = rows + -rows % 8
    return dataclasses.replace(product_tuning(gpu_kind(), padded, *shape), **changes)


def stacked_weights(shape: tuple[int, int, bool], layers: int) -> jax.Array:
    """Weights [layers, K, N] or [layers, N, K]; every layer holds the same numbers."""
    depth, columns, transposed = shape
    stored = (columns, depth) if transposed else (depth, columns)

    @jax.jit
    def fill(key):
        layer = jax.random.normal(key, stored, jnp.bfloat16) * depth**-0.5
        return jnp.broadcast_to(layer, (layers, *stored))

    return fill(jax.random.key(1))


def check(
    shape: tuple[int, int, bool], row_counts: tuple[int, ...], changes: dict[str, Any]
) -> dict[str, Any]:
    """Compare layer 1 of 3 (of 1 for a head) with XLA's product."""
    depth, columns, transposed = shape
    layers, layer = (1, 0) if transposed else (3, 1)
    stored = (columns, depth) if transposed else (depth, columns)
    weights = random_array(2, (layers, *stored), "bfloat16")

    @functools.partial(jax.jit, static_argnames="tuning")
    def errors(x, weights, index, tuning):
        got = skinny_product(x, weights, index, transposed=transposed, tuning=tuning)
        weight = weights[layer].T if transposed else weights[layer]
        want = jnp.dot(x, weight, preferred_element_type=jnp.float32)
        error = jnp.linalg.norm(got.sum(0) - want, axis=0) / jnp.linalg.norm(want, axis=0)
        return jnp.where(jnp.isfinite(error), error, jnp.inf).max()

    worst = 0.0
    for rows in row_counts:
        x = random_array(3, (rows, depth), "bfloat16")
        index = jnp.array([layer], jnp.int32)
        worst = max(worst, float(errors(x, weights, index, tuned(shape, rows, changes))))
    return {"ok": worst < TOLERANCE, "relative_error": worst}


def time_product(shape: tuple[int, int, bool], rows: int) -> dict[str, Any]:
    """The kernel beside XLA, which gets one array a layer: it would copy its slice of a stack."""
    depth, columns, _ = shape
    layers = -int(-ROTATED_BYTES // (depth * columns * 2))
    tuning = tuned(shape, rows, {})
    schedule = make_schedule(rows, depth, columns, False, tuning)

    def by_kernel(x, layer, weights):
        return skinny_product(x, weights, jnp.array([layer], jnp.int32), tuning=tuning)

    def by_xla(x, layer, weights):
        return jnp.dot(x, weights[layer], preferred_element_type=jnp.float32)

    x = random_array(3, (rows, depth), "bfloat16")
    stack = stacked_weights(shape, layers)
    seconds = seconds_in_a_chain(by_kernel, x, stack, layers=layers)
    arrays = [stack[layer] for layer in range(layers)]
    xla_seconds = seconds_in_a_chain(by_xla, x, arrays, layers=layers)
    floor = depth * columns * 2 / COPY_BYTES_PER_SECOND
    return {
        "microseconds": round(seconds * 1e6, 2),
        "xla_microseconds": round(xla_seconds * 1e6, 2),
        "floor_microseconds": round(floor * 1e6, 2),
        "share_of_copy_ceiling": round(floor / seconds, 3),
        "block_n": schedule.block_n,
        "partials": schedule.partials,
        "programs": schedule.programs,
        "stages": schedule.stages,
    }


def seconds_in_a_chain(
    product: Callable[..., jax.Array], x: jax.Array, weights: Any, *, layers: int
):
    """Time that a product adds to a chain in which every product waits for the one before.

    Between two products stands a kernel over x that reads one of the sums. The same chain
    without products is timed and taken off.
    """
    sums = jax.eval_shape(lambda x, weights: product(x, 0, weights), x, weights)

    def chain(with_products, x, weights):
        def one_round(_, carried):
            x, out = carried
            for layer in range(layers):
                if with_products:
                    out = product(x, layer, weights)
                x, out = lax.optimization_barrier((x, out))
                x = x + (out.reshape(-1)[0] * 0).astype(x.dtype)
                x, out = lax.optimization_barrier((x, out))
            return x, out

        return lax.fori_loop(0, ROUNDS, one_round, (x, jnp.zeros(sums.shape, sums.dtype)))[0]

    with_products, without = (
        best_seconds(jax.jit(functools.partial(chain, is_full)), x, weights)
        for is_full in (True, False)
    )
    return (with_products - without) / (ROUNDS * layers)


def best_seconds(run: Callable[..., jax.Array], *args: Any) -> float:
    """Best of five groups of ten calls that are dispatched together."""
    run(*args).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(10)])
        seconds.append((time.perf_counter() - start) / 10)
    return min(seconds)
