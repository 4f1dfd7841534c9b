"""Products of few rows with the norm or the gate before them: agreement, then time of a layer's."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernel_cases.products import best_seconds, seconds_in_a_chain, stacked_weights
from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array
from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.add_norm import add_norm
from pallas_kernels.fused.fused_inputs import total
from pallas_kernels.fused.gated_activation import gated_activation
from pallas_kernels.platform import gpu_kind
from pallas_kernels.products.gate_product import gate_product
from pallas_kernels.products.norm_product import norm_product
from pallas_kernels.products.product_tuning import product_tuning
from pallas_kernels.products.skinny_product import skinny_product

TOLERANCE = 5e-3  # a norm or a gate may be rounded the other way
ROTATED_BYTES = 300e6  # of weights that calls take turns over, so that L2 cannot serve them
ROUNDS = 4
EPS = 1e-6
PARTS = 6  # of the sums that come in

# model -> product -> (K, N)
MODELS = {
    "0.6B": {"qkv": (1024, 4096), "o": (2048, 1024), "gate up": (1024, 6144), "down": (3072, 1024)},
    "8B": {"qkv": (4096, 6144), "o": (4096, 4096), "gate up": (4096, 28672), "down": (14336, 4096)},
}
# Changes of the tuning that are timed for each product.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "132 programs": {"enough_programs": 132},
    "block_n 64": {"block_n": 64},
    "block_n 256": {"block_n": 256},
    "block_k 128": {"block_k": 128},
    "two a processor": {"num_processors": 264, "ring_kib": 96, "enough_programs": 264},
    "2 partials": {"max_partials": 2},
    "4 partials": {"max_partials": 4},
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing; "few rows check", "few rows time", "few rows layer"."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"few rows check {model} {name}": functools.partial(check, name, *shape)
        for model, shapes in MODELS.items()
        for name, shape in shapes.items()
    }
    for model, way in itertools.product(MODELS, WAYS):
        found[f"few rows layer {model} {way}"] = functools.partial(time_layer, model, way)
    for model, shapes in MODELS.items():
        for name, shape in shapes.items():
            for variant, changes in VARIANTS.items():
                found[f"few rows time {model} {name} {variant}"] = functools.partial(
                    time_product, name, *shape, changes
                )
            for rows in (1, 8):
                found[f"few rows time {model} {name} XLA's, {rows} rows"] = functools.partial(
                    time_by_xla, *shape, rows
                )
    return found


def _index(number: int) -> jax.Array:
    return jnp.array([number], jnp.int32)


def check(name: str, depth: int, columns: int) -> dict[str, Any]:
    """Compare layer 1 of 3 with float32 arithmetic on rounded norms and gates."""
    weights = random_array(2, (3, depth, columns), "bfloat16")
    gains = random_array(4, (3, depth), "bfloat16")

    @jax.jit
    def error(got, rows, weights):
        want = jnp.dot(rows, weights[1], preferred_element_type=jnp.float32)
        error = jnp.linalg.norm(got.sum(0) - want, axis=1) / jnp.linalg.norm(want, axis=1)
        return jnp.where(jnp.isfinite(error), error, jnp.inf).max()

    worst, is_same = 0.0, True
    for rows, parts in ((1, PARTS), (3, 1), (8, 0)):
        x = random_array(3, (rows, depth), "bfloat16")
        if name == "o":
            made, got = x, skinny_product(x, weights, _index(1))
        elif name == "down":
            gate_up = _sum(5, parts, (rows, 2 * depth))
            made = xla_fused.gated_activation(gate_up, activation="silu", dtype="bfloat16")
            got = gate_product(gate_up, weights, _index(1), activation="silu")
        else:
            delta = _sum(5, parts, (rows, depth))
            want_x, made = xla_fused.add_norm(x, delta, gains, _index(2), eps=EPS)
            got_x, got = norm_product(x, delta, gains, _index(2), weights, _index(1), eps=EPS)
            is_same = is_same and bool(jnp.allclose(got_x, want_x, rtol=1e-2, atol=1e-2))
        worst = max(worst, float(error(got, made, weights)))
    return {
        "ok": worst < TOLERANCE and is_same,
        "relative_error": worst,
        "is_residual_same": is_same,
    }


def _sum(seed: int, parts: int, shape: tuple[int, int]) -> jax.Array:
    """A product's result, whole where there are no parts."""
    if not parts:
        return random_array(seed, shape, "bfloat16")
    return random_array(seed, (parts, *shape), "float32")


def time_product(
    name: str, depth: int, columns: int, changes: dict[str, Any], rows: int = 1
) -> dict[str, Any]:
    """One product with what is fused into it, between two kernels of which one waits for it."""
    layers = max(2, -int(-ROTATED_BYTES // (depth * columns * 2)))
    tuning = replace(product_tuning(gpu_kind(), 8, depth, columns, False), **changes)
    gains = random_array(4, (layers, depth), "bfloat16")
    delta = jnp.zeros((PARTS, rows, depth), jnp.float32)

    def product(x, layer, weights):
        index = _index(layer)
        if name == "o":
            return skinny_product(x, weights, index, tuning=tuning)
        if name == "down":
            return gate_product(x, weights, index, activation="silu", tuning=tuning)
        return norm_product(x, delta, gains, index, weights, index, eps=EPS, tuning=tuning)[1]

    x = random_array(3, (rows, depth), "bfloat16")
    if name == "down":
        x = random_array(3, (2, rows, 2 * depth), "float32")
    weights = stacked_weights((depth, columns, False), layers)
    seconds = seconds_in_a_chain(product, x, weights, layers=layers)
    return _describe(seconds, depth, columns)


def time_by_xla(depth: int, columns: int, rows: int) -> dict[str, Any]:
    """XLA's product alone, of one array a layer."""
    layers = max(2, -int(-ROTATED_BYTES // (depth * columns * 2)))
    stack = stacked_weights((depth, columns, False), layers)
    arrays = [stack[layer] for layer in range(layers)]

    def product(x, layer, weights):
        return jnp.dot(x, weights[layer])

    x = random_array(3, (rows, depth), "bfloat16")
    return _describe(seconds_in_a_chain(product, x, arrays, layers=layers), depth, columns)


def _describe(seconds: float, depth: int, columns: int) -> dict[str, Any]:
    floor = depth * columns * 2 / COPY_BYTES_PER_SECOND
    return {
        "microseconds": round(seconds * 1e6, 2),
        "share_of_copy_ceiling": round(floor / seconds, 3),
    }


@dataclass(frozen=True)
class Way:
    """How a layer is computed.

    Attributes:
      rows: S.
      is_fused: norms and gate within the products.
      is_xla: the products are XLA's; else the skinny kernel's.
    """

    rows: int
    is_fused: bool
    is_xla: bool = False


WAYS = {
    "fused, 1 row": Way(1, True),
    "single kernels, 1 row": Way(1, False),
    "single kernels, 8 rows": Way(8, False),
    "fused, 2 rows": Way(2, True),
    "fused, 4 rows": Way(4, True),
    "fused, 8 rows": Way(8, True),
    "XLA's products, 8 rows": Way(8, False, is_xla=True),
    "XLA's products, 1 row": Way(1, False, is_xla=True),
}


def time_layer(model: str, way_name: str) -> dict[str, Any]:
    """All of a layer but rotary embedding and attention, for which one small kernel stands."""
    way, shapes = WAYS[way_name], MODELS[model]
    num_bytes = sum(depth * columns * 2 for depth, columns in shapes.values())
    layers = max(2, -int(-ROTATED_BYTES // num_bytes))
    weights: Any = {
        name: stacked_weights((*shape, False), layers) for name, shape in shapes.items()
    }
    if way.is_xla:
        weights = {name: [stack[i] for i in range(layers)] for name, stack in weights.items()}
    width = shapes["qkv"][0]
    gains = random_array(4, (2, layers, width), "bfloat16")
    attended = random_array(5, (way.rows, shapes["o"][0]), "bfloat16")

    def product(name, x, weights, layer):
        if way.is_xla:
            return jnp.dot(x, weights[name][layer])
        return skinny_product(x, weights[name], _index(layer))

    def normed_product(name, x, delta, gains, weights, layer):
        index = _index(layer)
        if way.is_fused:
            return norm_product(x, delta, gains, index, weights[name], index, eps=EPS)
        if delta.ndim == 2:
            x, delta = x + delta, None
        x, normed = add_norm(x, delta, gains, index, eps=EPS)
        return x, product(name, normed, weights, layer)

    def gated_product(name, gate_up, weights, layer):
        if way.is_fused:
            return gate_product(gate_up, weights[name], _index(layer), activation="silu")
        gated = gated_activation(gate_up, activation="silu", dtype="bfloat16")
        return product(name, gated, weights, layer)

    def one_layer(carried, gains, weights, layer):
        x, delta, attended = carried
        x, qkv = normed_product("qkv", x, delta, gains[0], weights, layer)
        attended, qkv = lax.optimization_barrier((attended, qkv))
        attended = attended + (qkv.reshape(-1)[0] * 0).astype(attended.dtype)
        attended, x = lax.optimization_barrier((attended, x))
        delta = product("o", attended, weights, layer)
        x, gate_up = normed_product("gate up", x, delta, gains[1], weights, layer)
        return x, gated_product("down", gate_up, weights, layer), attended

    def all_layers(_, carried, gains, weights):
        for layer in range(layers):
            carried = one_layer(carried, gains, weights, layer)
        return carried

    @jax.jit
    def run(x, attended, gains, weights):
        delta = product("o", attended, weights, 0)
        body = functools.partial(all_layers, gains=gains, weights=weights)
        x, delta, attended = lax.fori_loop(0, ROUNDS, body, (x, delta, attended))
        return x + total(delta, 2, x.dtype)

    x = random_array(3, (way.rows, width), "bfloat16")
    seconds = best_seconds(run, x, attended, gains, weights) / (ROUNDS * layers)
    floor = num_bytes / COPY_BYTES_PER_SECOND
    return {
        "microseconds": round(seconds * 1e6, 2),
        "floor_microseconds": round(floor * 1e6, 2),
    }
