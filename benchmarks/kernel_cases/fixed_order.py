"""Fixed-order products: equal bits in any company and agreement with XLA, then time beside it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases.products import (
    ROTATED_BYTES,
    SHAPES,
    TOLERANCE,
    seconds_in_a_chain,
    stacked_weights,
)
from benchmarks.kernel_cases.timing import random_array
from pallas_kernels.fused.fused_inputs import total
from pallas_kernels.products.fixed_order_product import fixed_order_product
from pallas_kernels.products.fixed_order_schedule import make_fixed_order_schedule

ALL_ROWS = 2048
PARTS = [(0, 1), (130, 143), (77, 141), (300, 500), (1000, 1700), (1024, 2048)]
"""Rows that must have the same bits as among all."""
MORE_SHAPES = {"8b gate up": (4096, 28672, False), "8b down": (14336, 4096, False)}
TIMED_ROWS = (8, 64, 256, 1024, 8192)
MAX_TIMED_RESULT = 1 << 28  # elements


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, shape in (SHAPES | MORE_SHAPES).items():
        found[f"fixed order check {name}"] = functools.partial(check, shape)
        for rows in TIMED_ROWS:
            if rows * shape[1] <= MAX_TIMED_RESULT:
                title = f"fixed order time {name} {rows} rows"
                found[title] = functools.partial(time_product, shape, rows)
    return found


def check(shape: tuple[int, int, bool]) -> dict[str, Any]:
    """Rows alone and among all, bit for bit, before and after rounding; and beside XLA's."""
    depth, columns, transposed = shape
    stored = (columns, depth) if transposed else (depth, columns)
    weights = random_array(2, (1, *stored), "bfloat16")
    x = random_array(3, (ALL_ROWS, depth), "bfloat16")
    index = jnp.zeros(1, jnp.int32)

    @functools.partial(jax.jit, static_argnames="dtype")
    def multiply(x, weights, dtype):
        out = fixed_order_product(x, weights, index, transposed=transposed, out_dtype=dtype)
        return total(out, 2, dtype)

    @jax.jit
    def error(got, x, weights):
        weight = weights[0].T if transposed else weights[0]
        want = jnp.dot(x, weight, preferred_element_type=jnp.float32)
        return (jnp.linalg.norm(got - want, axis=1) / jnp.linalg.norm(want, axis=1)).max()

    worst, differing = 0.0, {}
    for dtype in (jnp.float32, jnp.bfloat16):
        everyone = multiply(x, weights, dtype)
        if dtype == jnp.float32:
            worst = float(error(everyone, x, weights))
        for first, end in PARTS:
            part = multiply(x[first:end], weights, dtype)
            count = int((part != everyone[first:end]).sum())
            if count:
                differing[f"{jnp.dtype(dtype).name} {first}:{end}"] = count
    is_right = worst < TOLERANCE and not differing
    return {"ok": is_right, "relative_error": worst, "differing": differing}


def time_product(shape: tuple[int, int, bool], rows: int) -> dict[str, Any]:
    """The kernel beside XLA, which gets one array a layer."""
    depth, columns, transposed = shape
    layers = -int(-ROTATED_BYTES // (depth * columns * 2))
    out_dtype = jnp.float32 if transposed else jnp.bfloat16

    def by_kernel(x, layer, weights):
        index = jnp.array([layer], jnp.int32)
        return fixed_order_product(
            x, weights, index, transposed=transposed, out_dtype=out_dtype
        )  # fmt: skip

    def by_xla(x, layer, weights):
        weight = weights[layer].T if transposed else weights[layer]
        return jnp.dot(x, weight, preferred_element_type=out_dtype)

    x = random_array(3, (rows, depth), "bfloat16")
    stack = stacked_weights(shape, layers)
    seconds = seconds_in_a_chain(by_kernel, x, stack, layers=layers)
    arrays = [stack[layer] for layer in range(layers)]
    xla_seconds = seconds_in_a_chain(by_xla, x, arrays, layers=layers)
    schedule = make_fixed_order_schedule(rows, depth, columns)
    work, weight_bytes = 2 * rows * depth * columns, 2 * depth * columns
    return {
        "microseconds": round(seconds * 1e6, 2),
        "xla_microseconds": round(xla_seconds * 1e6, 2),
        "tflops": round(work / seconds / 1e12, 1),
        "weight_gb_a_second": round(weight_bytes / seconds / 1e9),
        "chunks": schedule.chunks,
        "splits_chunks": schedule.splits_chunks,
        "tile_columns": schedule.tile_columns,
        "warpgroups": schedule.warpgroups,
        "items": schedule.items,
        "stages": schedule.stages,
    }
