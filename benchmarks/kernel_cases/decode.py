"""Paged decode attention: agreement with the float32 reference, then time."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.attention import LAYERS, check, timed_cache
from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array, seconds_a_call
from pallas_kernels.attention.decode_attention import decode_attention
from pallas_kernels.attention.decode_plan import plan_decode

CALLS_A_LOOP = 2 * LAYERS
SMALL, LARGE = 16, 32  # query heads of 0.6B and 8B; both have 8 KV heads of 128

# name -> (tokens in cache by row, fields)
CHECKS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "decode g4 h128 b16": (list(range(0, 1600, 25)), {}),
    "decode g2 h128 one of 8 rows": ([500, *[0] * 7], {"heads": (16, 8, 128)}),
    "decode g4 h128 32768": ([32768], {}),
    "decode g4 h128 300 rows": ([(37 * row) % 900 for row in range(300)], {}),
    "decode g2 h128 b64": ([1000, 0, 3000, 17, 64], {"heads": (16, 8, 128), "page": 64}),
    "decode g3 h64 b16 fp16": ([999, 0, 130], {"heads": (9, 3, 64), "dtype": "float16"}),
    "decode g1 h256 b128": ([900, 128, 129, 0], {"heads": (8, 8, 256), "page": 128}),
    "decode g64 h128 b32": ([1500, 64, 700], {"heads": (64, 1, 128), "page": 32}),
    "decode g12 h64 b32": ([1500, 64, 700], {"heads": (24, 2, 64), "page": 32}),
    "decode window 1000 h128": ([5000, 100, 0, 1500], {"heads": (16, 8, 128), "window": 1000}),
    "decode window cap h256": (
        [2000, 100, 5], {"heads": (8, 4, 256), "window": 129, "cap": 20.0},
    ),
    "decode split_tokens": ([3000, 0, 256, 257, 1], {"split_tokens": 256}),
    "decode split_tokens window": ([3000, 0, 257], {"split_tokens": 128, "window": 500}),
    "decode beyond 2^32 elements": ([1000, 77, 0, 512], {"far": True}),
}  # fmt: skip

# name -> (query heads, tokens in cache by row)
TIMINGS: dict[str, tuple[int, list[int]]] = {
    f"time decode {size} {name}": (heads, lens)
    for size, heads in (("0.6B", SMALL), ("8B", LARGE))
    for name, lens in {
        "1 of 8 rows context 512": [512, *[0] * 7],
        "64 rows context 256": [256] * 64,
        "256 rows context 576": [576] * 256,
        "64 rows context 1024": [1024] * 64,
        "256 rows context 1024": [1024] * 256,
        "1 row context 32768": [32768],
        "64 rows ragged": np.random.default_rng(0).integers(512, 1025, 64).tolist(),
    }.items()
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        name: functools.partial(check, None, *case) for name, case in CHECKS.items()
    }
    found["decode counters are left at zero"] = check_counters
    return found | {name: functools.partial(time_decode, *case) for name, case in TIMINGS.items()}


def _plan(lens: Any, max_tokens: int):
    return plan_decode(lens, num_kv_heads=8, head_dim=128, dtype="bfloat16", max_tokens=max_tokens)


def check_counters() -> dict[str, Any]:
    """Many calls with one plan, whose rows are cut: all alike to the bit, counters 0 after."""
    seq_lens = [5000, 0, 700, 1300]
    keys, values, table = timed_cache(len(seq_lens), max(seq_lens))
    lens = jnp.asarray(seq_lens, jnp.int32)
    plan = _plan(lens, max(seq_lens))
    q, layer = random_array(3, (len(seq_lens), 32, 128), "bfloat16"), jnp.zeros(1, jnp.int32)
    outs = [
        np.asarray(
            decode_attention(q, keys, values, layer, table, lens, scale=128**-0.5, plan=plan)
        )
        for _ in range(20)
    ]
    is_same = all((out == outs[0]).all() for out in outs)
    left = int(np.abs(np.asarray(plan.counters)).max())
    return {"ok": is_same and left == 0, "is_same": is_same, "counters": left}


def time_decode(num_heads: int, seq_lens: list[int]):
    """One layer, its plan made beforehand as in a model."""
    num_rows, context = len(seq_lens), max(seq_lens)
    real_rows = sum(length > 0 for length in seq_lens)
    keys, values, table = timed_cache(real_rows, context)
    table = jnp.pad(table, ((0, num_rows - real_rows), (0, 0)))
    q = random_array(3, (num_rows, num_heads, 128), "bfloat16")
    lens = jnp.asarray(seq_lens, jnp.int32)
    plan = _plan(lens, context)

    def call(q, _, keys, values, table, lens, plan):
        for turn in range(CALLS_A_LOOP):  # so that the loop's own kernels hardly count
            layer = jnp.full(1, turn % LAYERS, jnp.int32)
            q = decode_attention(q, keys, values, layer, table, lens, scale=128**-0.5, plan=plan)
        return q

    loops = 30 if sum(seq_lens) < 2**17 else 6
    others = (keys, values, table, lens, plan)
    seconds = seconds_a_call(call, q, *others, calls=loops, layers=LAYERS) / CALLS_A_LOOP
    bytes_read = sum(seq_lens) * 8 * 128 * 2 * 2
    return {
        "microseconds": round(seconds * 1e6, 2),
        "gigabytes_per_second": round(bytes_read / seconds / 1e9),
        "share_of_copy_ceiling": round(bytes_read / seconds / COPY_BYTES_PER_SECOND, 3),
    }
