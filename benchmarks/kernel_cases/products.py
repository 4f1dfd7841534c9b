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
    "8b gate up": (4096, 28672, False),
    "8b down": (14336, 4096, False),
    "8b head": (4096, 128256, True),
    "0.6b qkv": (1024, 4096, False),
    "0.6b o": (2048, 1024, False),
    "0.6b gate up": (1024, 6144, False),
    "0.6b down": (3072, 1024, False),
    "0.6b head": (1024, 151936, True),
}
# Variants of three shapes, as (shape, rows)
VARIED = (("8b gate up", 8), ("8b gate up", 64), ("8b o", 8), ("0.6b gate up", 8))
VARIANTS: dict[str, dict[str, Any]] = {
    "block_n 64": {"block_n": 64},
    "block_n 128": {"block_n": 128},
    "block_n 256": {"block_n": 256},
    "block_k 128": {"block_k": 128},
    "ring 96": {"ring_kib": 96},
    "ring 200": {"ring_kib": 200},
    "partials 1": {"max_partials": 1},
    "enough_programs 56": {"enough_programs": 56},
    "enough_programs 132": {"enough_programs": 132},
    "dependent launch": {"dependent_launch": True},
}
LAYERS = 28  # of the chain that is shaped like Qwen3-0.6B


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing; "product check", "time", "tune" or "chain" chooses a kind."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, shape in SHAPES.items():
        found[f"product check {name}"] = functools.partial(check, shape, (8, 16, 64), {})
    odd: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
        "13 and 128 rows": ("8b qkv", (13, 128), {}),
        "dependent launch": ("0.6b qkv", (8, 64), {"dependent_launch": True}),
        "block_n 256": ("0.6b gate up", (8, 64), {"block_n": 256}),
        "uneven shares": ("8b qkv", (8,), {"num_processors": 107}),
    }
    for title, (name, rows, changes) in odd.items():
        found[f"product check {title}"] = functools.partial(check, SHAPES[name], rows, changes)
    for name, shape in SHAPES.items():
        for rows in (8, 64):
            found[f"product time {name} {rows} rows"] = functools.partial(time_ours, shape, rows)
            found[f"product time {name} {rows} rows xla"] = functools.partial(time_xla, shape, rows)
    for name, rows in VARIED:
        for variant, changes in VARIANTS.items():
            found[f"product tune {name} {rows} rows {variant}"] = functools.partial(
                time_ours, SHAPES[name], rows, changes
            )
    for rows in (8, 64):
        for name, changes in CHAINS.items():
            found[f"product chain {rows} rows {name}"] = functools.partial(
                time_model_chain, rows, changes
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


def time_ours(
    shape: tuple[int, int, bool], rows: int, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    depth, columns, transposed = shape
    tuning = tuned(shape, rows, changes or {})
    schedule = make_schedule(rows, depth, columns, transposed, tuning)

    def product(x, layer, weights):
        index = jnp.array([layer], jnp.int32)
        return skinny_product(x, weights, index, transposed=transposed, tuning=tuning)

    layers = rotated_layers(shape)
    x = random_array(3, (rows, depth), "bfloat16")
    seconds = seconds_in_a_chain(product, x, stacked_weights(shape, layers), layers=layers)
    return report(shape, seconds) | {
        "block_n": schedule.block_n,
        "partials": schedule.partials,
        "programs": schedule.programs,
        "stages": schedule.stages,
    }


def time_xla(shape: tuple[int, int, bool], rows: int) -> dict[str, Any]:
    """One array a layer: XLA would copy the slice of a stack that it reads with a kernel."""
    depth, _, transposed = shape

    def product(x, layer, weights):
        weight = weights[layer].T if transposed else weights[layer]
        return jnp.dot(x, weight, preferred_element_type=jnp.float32)

    layers = rotated_layers(shape)
    weights = [stacked_weights(shape, 1)[0] for _ in range(layers)]
    x = random_array(3, (rows, depth), "bfloat16")
    return report(shape, seconds_in_a_chain(product, x, weights, layers=layers))


def rotated_layers(shape: tuple[int, int, bool]) -> int:
    depth, columns, _ = shape
    return -int(-ROTATED_BYTES // (depth * columns * 2))


def report(shape: tuple[int, int, bool], seconds: float) -> dict[str, Any]:
    depth, columns, _ = shape
    floor = depth * columns * 2 / COPY_BYTES_PER_SECOND
    return {
        "microseconds": round(seconds * 1e6, 2),
        "floor_microseconds": round(floor * 1e6, 2),
        "microseconds_over_floor": round((seconds - floor) * 1e6, 2),
        "share_of_copy_ceiling": round(floor / seconds, 3),
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


CHAINS: dict[str, dict[str, Any] | None] = {
    "xla": None,
    "alone": {},
    "dependent launch": {"dependent_launch": True},
    "ring 96": {"ring_kib": 96},
    "dependent launch ring 96": {"dependent_launch": True, "ring_kib": 96},
}


def time_model_chain(rows: int, changes: dict[str, Any] | None) -> dict[str, Any]:
    """Time 28 layers of four products in one program, each with the sum and cast after it.

    `changes` None = XLA's products, of one array a layer.
    """
    names = ("0.6b qkv", "0.6b o", "0.6b gate up", "0.6b down")
    shapes = [SHAPES[name] for name in names]

    def product(x, layer, weights, shape):
        if changes is None:
            return jnp.dot(x, weights[layer], preferred_element_type=jnp.float32)
        index = jnp.array([layer], jnp.int32)
        return skinny_product(x, weights, index, tuning=tuned(shape, rows, changes)).sum(0)

    @jax.jit
    def run(x, *weights):
        for layer in range(LAYERS):
            for index, shape in enumerate(shapes):
                sums = product(x, layer, weights[index], shape)
                next_depth = shapes[(index + 1) % len(shapes)][0]
                x = lax.optimization_barrier(sums[:, :next_depth].astype(x.dtype))
        return x

    weights = [stacked_weights(shape, LAYERS) for shape in shapes]
    if changes is None:
        weights = [[stack[layer] for layer in range(LAYERS)] for stack in weights]
    x = random_array(3, (rows, shapes[0][0]), "bfloat16")
    seconds = best_seconds(run, x, *weights)
    floor = sum(depth * columns * 2 for depth, columns, _ in shapes) * LAYERS
    return {
        "microseconds": round(seconds * 1e6, 1),
        "floor_microseconds": round(floor / COPY_BYTES_PER_SECOND * 1e6, 1),
    }
