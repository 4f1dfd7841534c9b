"""Paged attention: agreement with the float32 reference, then time."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array, seconds_a_call
from pallas_kernels.attention.decode_attention import decode_attention
from pallas_kernels.attention.paged_inputs import PrefillTiles
from pallas_kernels.attention.prefill_attention import prefill_attention, prefill_tiles
from pallas_kernels.attention.reference import paged_attention
from pallas_kernels.attention.tuning import prefill_tuning
from pallas_kernels.platform import gpu_kind

TOLERANCE = 0.01
FLOPS_PER_SECOND = 7.9e14  # of large bfloat16 products on an H200
SAMPLES = 48  # tokens of a case that are compared with the reference
LAYERS = 4  # of a timed cache: each call reads another layer, so that L2 cannot serve it

# name -> (query tokens by row, or None for decode; tokens in cache by row; fields)
CHECKS: dict[str, tuple[list[int] | None, list[int], dict[str, Any]]] = {
    "prefill ragged h128 b16": ([1, 300, 29, 64, 700], [40, 470, 29, 64, 700], {"first": 1}),
    "prefill g2 h128 b64": (
        [1000, 1, 0, 77], [1000, 90, 0, 500], {"heads": (16, 8, 128), "page": 64},
    ),
    "prefill g3 h64 fp16": (
        [270, 9, 128], [700, 139, 128], {"heads": (9, 3, 64), "dtype": "float16"},
    ),
    "prefill g1 h256 b128": ([500, 3], [500, 300], {"heads": (4, 4, 256), "page": 128}),
    "prefill g8 cap b32": ([500, 33], [900, 300], {"heads": (8, 1, 128), "page": 32, "cap": 20.0}),
    "prefill window h64": ([500, 33], [900, 300], {"heads": (4, 2, 64), "window": 100}),
    "prefill window cap h256": (
        [500, 33], [900, 300], {"heads": (4, 2, 256), "window": 129, "cap": 20.0},
    ),
    "prefill 8192 on 24576": ([8192], [8192 + 24576], {}),
    "prefill 16 rows of 512": ([512] * 16, [512] * 16, {}),
    "prefill decoded rows": (
        [1] * 9 + [300, 29], [70] * 9 + [470, 29], {"first": 9, "decoded": 11},
    ),
    "prefill decoded n40 h64": (
        [1, 1, 130], [9, 70, 130], {"heads": (40, 8, 64), "first": 2, "decoded": 2},
    ),
    "prefill plain": ([1, 300, 29, 700], [40, 470, 29, 700], {"tuning": {"ping_pong": False}}),
    "prefill beyond 2^32 elements": ([600, 100], [700, 1000], {"far": True}),
}  # fmt: skip


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    checks = {name: functools.partial(check, *case) for name, case in CHECKS.items()}
    return checks | prefill_timings()


def check(num_queries: list[int] | None, seq_lens: list[int], fields: dict[str, Any]):
    """Compare sampled tokens of one case with the float32 reference."""
    rng = np.random.default_rng(0)
    num_heads, num_kv_heads, head_dim = fields.get("heads", (32, 8, 128))
    page, dtype = fields.get("page", 16), fields.get("dtype", "bfloat16")
    queries = [1] * len(seq_lens) if num_queries is None else num_queries
    starts = np.cumsum([0, *queries])
    used = [-(-n // page) for n in seq_lens]
    ids = rng.permutation(sum(used)).astype(np.int32)
    table = np.full((len(used), max(used) + 3), 2**30, np.int32)
    for row, count in enumerate(used):
        table[row, :count] = ids[sum(used[:row]) :][:count]
    keys, values = (
        random_array(seed, (1, len(ids), page, num_kv_heads, head_dim), dtype) for seed in (1, 2)
    )
    q = random_array(
        3, (starts[-1] + (0 if num_queries is None else 5), num_heads, head_dim), dtype
    )
    options = {
        "scale": head_dim**-0.5,
        "sliding_window": fields.get("window"),
        "soft_cap": fields.get("cap"),
    }
    cache = (keys, values, jnp.array([0]), jnp.asarray(table))
    if fields.get("far"):
        cache = move_far(keys, values, table)
    lens = jnp.asarray(seq_lens, jnp.int32)
    if num_queries is None:
        out = decode_attention(q, *cache, lens, split_tokens=fields.get("split_tokens"), **options)
    else:
        out = prefill_checked(q, cache, lens, starts, fields, options)
    out = np.array(out.astype(jnp.float32))
    asked = [
        (token, row, seq_lens[row] - (starts[row + 1] - token) + 1)
        for row in range(fields.get("first", 0), len(seq_lens))
        if seq_lens[row]
        for token in range(starts[row], starts[row + 1])
    ]
    tokens = [token for token, _, _ in asked]
    rest = np.delete(out, tokens, axis=0)
    if len(asked) > SAMPLES:
        picked = {0, len(asked) - 1, *rng.choice(len(asked), SAMPLES - 2, replace=False).tolist()}
        asked = [asked[index] for index in sorted(picked)]
    want = expected(q, keys, values, table, asked, options)
    got = out[[token for token, _, _ in asked]]
    errors = np.linalg.norm(got - want, axis=(1, 2)) / np.linalg.norm(want, axis=(1, 2))
    is_finite = bool(np.isfinite(out).all())
    return {
        "ok": bool(errors.max() < TOLERANCE) and is_finite and not rest.any(),
        "relative_error": float(errors.max()),
        "is_finite": is_finite,
        "others_are_zero": not rest.any(),
    }


def prefill_checked(q, cache, lens, starts, fields: dict[str, Any], options) -> jax.Array:
    """Prefill attention; NaN where the results of the decode rows did not pass through it."""
    first, decoded = fields.get("first", 0), None
    if "decoded" in fields:
        decoded = random_array(4, (fields["decoded"], *q.shape[1:]), q.dtype.name)
    tuning = prefill_tuning(gpu_kind(), q.shape[2], q.dtype)
    out = prefill_attention(
        q, *cache, lens, jnp.asarray(starts, jnp.int32), jnp.array([first], jnp.int32), decoded,
        tuning=replace(tuning, **fields.get("tuning", {})), **options,
    )  # fmt: skip
    if decoded is None:
        return out
    is_same = (out[: starts[first]] == decoded[: starts[first]]).all()
    return out.at[: starts[first]].set(jnp.where(is_same, 0, jnp.nan))


def move_far(keys: jax.Array, values: jax.Array, table: np.ndarray):
    """Put the pages at the end of the last layer of a cache of more than 2^32 elements."""
    _, count, page, num_kv_heads, head_dim = keys.shape
    num_layers = 4
    num_pages = 2**32 // (num_layers * page * num_kv_heads * head_dim) + 5000

    @jax.jit
    def place(pages):
        far = jnp.zeros((num_layers, num_pages, *pages.shape[2:]), pages.dtype)
        return lax.dynamic_update_slice(far, pages, (num_layers - 1, num_pages - count, 0, 0, 0))

    far_table = np.where(table < count, table + (num_pages - count), table)
    return place(keys), place(values), jnp.array([num_layers - 1]), jnp.asarray(far_table)


def expected(q, keys, values, table, asked, options) -> np.ndarray:
    """The reference for single tokens (token, row, keys seen), in float32."""

    @jax.jit
    def one_by_one(q, keys, values, table, tokens, rows, lengths):
        def one(args):
            token, row, length = args
            return paged_attention(
                q[token][None].astype(jnp.float32), keys, values, jnp.array([0]),
                table[row][None], length[None], jnp.array([0, 1]), **options,
            )[0]  # fmt: skip

        return lax.map(one, (tokens, rows, lengths))

    tokens, rows, lengths = (jnp.asarray(x, jnp.int32) for x in zip(*asked, strict=True))
    return np.asarray(one_by_one(q, keys, values, jnp.asarray(table), tokens, rows, lengths))


def timed_cache(num_rows: int, context: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cache of 8 KV heads, head dim 128 and pages of 16, and a permuted page table."""
    pages_a_row = -(-context // 16)
    num_pages = num_rows * pages_a_row

    @jax.jit
    def fill(seed):
        layer = jax.random.normal(jax.random.key(seed), (1, num_pages, 16, 8, 128), jnp.bfloat16)
        return jnp.broadcast_to(layer, (LAYERS, *layer.shape[1:]))

    table = np.random.default_rng(0).permutation(num_pages).reshape(num_rows, pages_a_row)
    return fill(1), fill(2), jnp.asarray(table, jnp.int32)


def prefill_timings() -> dict[str, Any]:
    batches = {
        "8192": (1, 8192, 0),
        "8192 on 24576": (1, 8192, 24576),
        "16x512": (16, 512, 0),
        "64x128": (64, 128, 0),
    }
    return {
        f"time prefill {name}": functools.partial(time_prefill, *batch)
        for name, batch in batches.items()
    }


def time_prefill(num_rows: int, num_tokens: int, prefix: int) -> dict[str, Any]:
    """Time rows of `num_tokens` queries each; its tiles are planned before the layers."""
    num_heads = 32
    keys, values, table = timed_cache(num_rows, prefix + num_tokens)
    q = random_array(3, (num_rows * num_tokens, num_heads, 128), "bfloat16")
    lens = jnp.full(num_rows, prefix + num_tokens, jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * num_tokens
    first = jnp.zeros(1, jnp.int32)
    tiles = prefill_tiles(starts, first, lens, num_tokens=q.shape[0], head_dim=128, dtype=q.dtype)

    def call(q, layer, keys, values, table, lens, starts, first, *tiles):
        return prefill_attention(
            q, keys, values, layer, table, lens, starts, first, None,
            PrefillTiles(*tiles), scale=128**-0.5,
        )  # fmt: skip

    others = (keys, values, table, lens, starts, first, *tiles)
    pairs = num_rows * (num_tokens * prefix + num_tokens * (num_tokens + 1) // 2)
    flops = 4 * num_heads * 128 * pairs
    calls = 10 if flops > 2e11 else 60
    seconds = seconds_a_call(call, q, *others, calls=calls, layers=LAYERS)
    moved_bytes = 2 * q.nbytes + 2 * num_rows * (prefix + num_tokens) * 8 * 128 * 2
    floor = max(flops / FLOPS_PER_SECOND, moved_bytes / COPY_BYTES_PER_SECOND)
    return {
        "microseconds": round(seconds * 1e6, 1),
        "teraflops_per_second": round(flops / seconds / 1e12, 1),
        "share_of_limit": round(floor / seconds, 3),
    }
