"""Paged attention: agreement with the float32 reference, then time."""

import functools
from collections.abc import Callable, Sequence
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
CALLS = 40  # in a timed loop
# Sizes of every timed prefill batch.
PADDED_TOKENS, PADDED_ROWS, MAX_CONTEXT, POOL_TOKENS = 8192, 256, 32768, 73728
KV_HEADS, HEAD_DIM = 8, 128
SCALE = HEAD_DIM**-0.5

Asked = tuple[int, int, int]  # token, its row, how many keys it sees
Rows = list[tuple[int, int]]  # query tokens and tokens in cache before them

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

MIXED: Rows = [
    *((1, 29 + 41 * index) for index in range(48)),
    *((tokens, 0) for tokens in (17, 64, 130, 300, 511, 700, 1000, 1500)),
    *((tokens, 300 * index) for index, tokens in enumerate((33, 100, 200, 400, 600, 900, 1200))),
]
BATCHES: dict[str, Rows] = {
    "short 16x512": [(512, 0)] * 16,
    "short 64x128": [(128, 0)] * 64,
    "short 240x34": [(34, 0)] * 240,
    "short 8x1024": [(1024, 0)] * 8,
    "short mixed": MIXED,
    "long 4x2048": [(2048, 0)] * 4,
    "long 1x8192": [(8192, 0)],
    "long 8192 on 24576": [(8192, 24576)],
}


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
    asked = asked_tokens(starts, seq_lens, fields.get("first", 0))
    error = sampled_error(out, q, keys, values, table, asked, options)
    rest = np.delete(out, [token for token, _, _ in asked], axis=0)
    is_finite = bool(np.isfinite(out).all())
    return {
        "ok": error < TOLERANCE and is_finite and not rest.any(),
        "relative_error": error,
        "is_finite": is_finite,
        "others_are_zero": not rest.any(),
    }


def asked_tokens(starts: np.ndarray, seq_lens: Sequence[int], first: int) -> list[Asked]:
    """The tokens of rows `first` and later."""
    return [
        (token, row, seq_lens[row] - (starts[row + 1] - token) + 1)
        for row in range(first, len(seq_lens))
        if seq_lens[row]
        for token in range(starts[row], starts[row + 1])
    ]


def sampled_error(out: np.ndarray, q, keys, values, table, asked: list[Asked], options) -> float:
    """Largest relative error of [T, N, H] float32 results, of some of the tokens asked for."""
    if len(asked) > SAMPLES:
        rng = np.random.default_rng(0)
        picked = {0, len(asked) - 1, *rng.choice(len(asked), SAMPLES - 2, replace=False).tolist()}
        asked = [asked[index] for index in sorted(picked)]
    want = expected(q, keys, values, table, asked, options)
    got = out[[token for token, _, _ in asked]]
    errors = np.linalg.norm(got - want, axis=(1, 2)) / np.linalg.norm(want, axis=(1, 2))
    return float(errors.max())


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


def expected(q, keys, values, table, asked: list[Asked], options) -> np.ndarray:
    """The reference for single tokens, in float32."""
    tokens, rows, lengths = (jnp.asarray(x, jnp.int32) for x in zip(*asked, strict=True))
    return np.asarray(
        one_by_one(q, keys, values, jnp.asarray(table), tokens, rows, lengths, **options)
    )


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def one_by_one(q, keys, values, table, tokens, rows, lengths, **options):
    """The reference for tokens [n] of rows [n] that see as many keys as lengths [n] says."""

    def one(args):
        token, row, length = args
        return paged_attention(
            q[token][None].astype(jnp.float32), keys, values, jnp.array([0]),
            table[row][None], length[None], jnp.array([0, 1]), **options,
        )[0]  # fmt: skip

    return lax.map(one, (tokens, rows, lengths))


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


def prefill_timings() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> timing, of 32 and of 16 query heads."""
    return {
        f"prefill {name} n{num_heads}": functools.partial(time_prefill, rows, num_heads)
        for num_heads in (32, 16)
        for name, rows in BATCHES.items()
    }


def time_prefill(rows: Rows, num_heads: int) -> dict[str, Any]:
    """Compare a batch with the reference and time it; its tiles are planned before the layers."""
    arguments = prefill_arguments(rows, num_heads)

    def call(q, layer, keys, values, table, lens, starts, first, *tiles):
        return prefill_attention(
            q, keys, values, layer, table, lens, starts, first, None,
            PrefillTiles(*tiles), scale=SCALE,
        )  # fmt: skip

    q, keys, values, table, lens, starts = arguments[:6]
    out = jax.jit(call)(q, jnp.zeros(1, jnp.int32), *arguments[1:])
    asked = asked_tokens(np.asarray(starts), np.asarray(lens).tolist(), 0)
    out = np.asarray(out.astype(jnp.float32))
    error = sampled_error(out, q, keys, values, table, asked, {"scale": SCALE})
    pairs = sum(tokens * before + tokens * (tokens + 1) // 2 for tokens, before in rows)
    flops = 4 * num_heads * HEAD_DIM * pairs
    keys_and_queries = KV_HEADS * int(lens.sum()) + num_heads * len(asked)
    moved_bytes = 2 * 2 * HEAD_DIM * keys_and_queries  # K and V; queries and results
    seconds = seconds_a_call(call, *arguments, calls=CALLS, layers=LAYERS)
    floor = max(flops / FLOPS_PER_SECOND, moved_bytes / COPY_BYTES_PER_SECOND)
    return {
        "ok": error < TOLERANCE and not out[len(asked) :].any(),
        "relative_error": error,
        "microseconds": round(seconds * 1e6, 1),
        "teraflops_per_second": round(flops / seconds / 1e12, 1),
        "share_of_limit": round(floor / seconds, 3),
    }


def prefill_arguments(rows: Rows, num_heads: int) -> tuple[jax.Array, ...]:
    """Queries, K, V, page table, lengths, query offsets, first row, tiles; of one size each."""
    queries, lengths = np.zeros(PADDED_ROWS, np.int32), np.zeros(PADDED_ROWS, np.int32)
    queries[: len(rows)] = [tokens for tokens, _ in rows]
    lengths[: len(rows)] = [tokens + before for tokens, before in rows]
    keys, values, pages = timed_cache(1, POOL_TOKENS)
    ids, end = np.asarray(pages[0]), 0
    table = np.zeros((PADDED_ROWS, MAX_CONTEXT // 16), np.int32)
    for row, count in enumerate(-(-lengths // 16)):
        table[row, :count] = ids[end : end + count]
        end += count
    q = random_array(3, (PADDED_TOKENS, num_heads, HEAD_DIM), "bfloat16")
    starts = jnp.asarray(np.append(0, queries.cumsum()), jnp.int32)
    first, lens = jnp.zeros(1, jnp.int32), jnp.asarray(lengths)
    tiles = prefill_tiles(
        starts, first, lens,
        num_tokens=PADDED_TOKENS, head_dim=HEAD_DIM, dtype=q.dtype, group=num_heads // KV_HEADS,
    )  # fmt: skip
    return q, keys, values, jnp.asarray(table), lens, starts, first, *tiles
