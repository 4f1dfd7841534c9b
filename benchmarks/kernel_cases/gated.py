"""Gate and up multiplied and gated in one kernel: agreement, then time beside product and gate."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases.products import seconds_in_a_chain, stacked_weights
from benchmarks.kernel_cases.timing import random_array
from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.fused_inputs import Activation
from pallas_kernels.fused.gated_activation import gated_activation
from pallas_kernels.products.gated_product import default_tuning, gated_product

TOLERANCE = 3e-3  # one rounding to bfloat16
ROTATED_BYTES = 200e6  # of weights that calls take turns over, so that L2 cannot serve them

# model -> (D, F)
MODELS = {"0.6B": (1024, 3072), "1B": (2048, 8192), "8B": (4096, 14336)}
CHECKED_ROWS = (8, 64, 104, 256, 1000, 8192)
TILE_ROWS = (8, 200, 256, 1000)  # at which 0.6B checks every tile
TIMED_ROWS = (8, 64, 128, 256, 512, 1024, 2048, 8192)
# Changes of the tuning that the shapes get.
TILES: dict[str, dict[str, int]] = {
    "column tile 128": {"column_tile": 128, "warpgroups": 2},
    "column tile 64": {"column_tile": 64, "warpgroups": 2},
    "column tile 64 warpgroups 1": {"column_tile": 64, "warpgroups": 1},
}
VARIANTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "row group 4": {"row_group": 4},
    "row group 16": {"row_group": 16},
    **TILES,
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing; "gated check" or "gated time" chooses a kind."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for (model, shape), rows in itertools.product(MODELS.items(), CHECKED_ROWS):
        title = f"gated check {model} {rows} rows"
        found[title] = functools.partial(check, rows, *shape, {})
    for (name, changes), rows in itertools.product(TILES.items(), TILE_ROWS):
        title = f"gated check 0.6B {rows} rows {name}"
        found[title] = functools.partial(check, rows, *MODELS["0.6B"], changes)
    overlapping = functools.partial(check, 1001, 1024, 1344, {}, "float16", "gelu_tanh")
    found["gated check overlapping columns gelu fp16"] = overlapping
    for (model, shape), rows in itertools.product(MODELS.items(), TIMED_ROWS):
        title = f"gated time {model} {rows} rows"
        found[f"{title} by XLA and the gate"] = functools.partial(time_two, rows, *shape)
        for name, changes in VARIANTS.items():
            found[f"{title} {name}"] = functools.partial(time_one, rows, *shape, changes)
    return found


def check(
    rows: int,
    depth: int,
    width: int,
    changes: dict[str, int],
    dtype: str = "bfloat16",
    activation: Activation = "silu",
) -> dict[str, Any]:
    """Compare layer 1 of 2 with a gate in float32 of float32 sums; the worst row counts."""
    weights = random_array(2, (2, depth, 2 * width), dtype)
    x = random_array(3, (rows, depth), dtype) * depth**-0.5
    tuning = dataclasses.replace(default_tuning(rows, width), **changes)

    @jax.jit
    def error(x, weights):
        index = jnp.array([1], jnp.int32)
        got = gated_product(x, weights, index, activation=activation, tuning=tuning)
        sums = jnp.dot(x, weights[1], preferred_element_type=jnp.float32)
        want = xla_fused.gated_activation(sums, activation=activation, dtype="float32")
        norm = functools.partial(jnp.linalg.norm, axis=1)
        errors = norm(got.astype(jnp.float32) - want) / norm(want)
        return jnp.where(jnp.isfinite(errors), errors, jnp.inf).max()

    worst = float(error(x, weights))
    return {"ok": worst < TOLERANCE, "relative_error": worst}


def time_one(rows: int, depth: int, width: int, changes: dict[str, int]) -> dict[str, Any]:
    """The one kernel, which reads its layer of a stack."""
    tuning = dataclasses.replace(default_tuning(rows, width), **changes)

    def by_kernel(x, layer, weights):
        index = jnp.array([layer], jnp.int32)
        return gated_product(x, weights, index, activation="silu", tuning=tuning)

    layers = _layers(depth, width)
    stack = stacked_weights((depth, 2 * width, False), layers)
    return _time(by_kernel, rows, depth, width, stack, layers)


def time_two(rows: int, depth: int, width: int) -> dict[str, Any]:
    """XLA's product, of one array a layer, and the gate's kernel."""

    def by_two(x, layer, weights):
        gate_up = jnp.dot(x, weights[layer])
        return gated_activation(gate_up, activation="silu", dtype=x.dtype)

    layers = _layers(depth, width)
    stack = stacked_weights((depth, 2 * width, False), layers)
    arrays = [stack[layer] for layer in range(layers)]
    return _time(by_two, rows, depth, width, arrays, layers)


def _layers(depth: int, width: int) -> int:
    return max(2, -int(-ROTATED_BYTES // (4 * depth * width)))


def _time(
    product: Callable[..., jax.Array], rows: int, depth: int, width: int, weights: Any, layers: int
) -> dict[str, Any]:
    x = random_array(3, (rows, depth), "bfloat16")
    seconds = seconds_in_a_chain(product, x, weights, layers=layers)
    work = 4 * rows * depth * width
    return {
        "microseconds": round(seconds * 1e6, 2),
        "tflops": round(work / seconds / 1e12, 1),
    }
