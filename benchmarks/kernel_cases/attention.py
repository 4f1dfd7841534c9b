"""Paged attention: agreement with the float32 reference, then time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array, seconds_a_call
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.reference import paged_attention
from pallas_kernels.tuning import DecodeTuningConfig, PrefillTuningConfig

TOLERANCE = 0.01
SAMPLES = 48  # tokens of a case that are compared with the reference
LAYERS = 4  # of a timed cache: each call reads another layer, so that L2 cannot serve it

# name -> (query tokens by row, or None for decode; tokens in cache by row; fields)
CHECKS: dict[str, tuple[list[int] | None, list[int], dict[str, Any]]] = {
    "decode g4 h128 b16": (None, list(range(0, 1600, 25)), {}),
    "decode g4 h128 b16 8 rows": (None, [1000, 0, 3, 64, 65, 900, 128, 2000], {}),
    "decode g2 h128 b64": (None, [1000, 0, 3000, 17, 64], {"heads": (16, 8, 128), "page": 64}),
    "decode g3 h64 b16 fp16": (None, [999, 0, 130], {"heads": (9, 3, 64), "dtype": "float16"}),
    "decode g1 h256 b128": (None, [900, 128, 129, 0], {"heads": (8, 8, 256), "page": 128}),
    "decode g64 h128 b32": (None, [1500, 64, 700], {"heads": (64, 1, 128), "page": 32}),
    "decode window h64": (None, [2000, 100, 5], {"heads": (6, 2, 64), "window": 100}),
    "decode window cap h256": (
        None, [2000, 100, 5], {"heads": (8, 4, 256), "window": 129, "cap": 20.0},
    ),
    "decode cap h128": (None, [700, 1, 64], {"cap": 20.0}),
    "decode split_tokens": (None, [3000, 0, 256, 257, 1], {"split_tokens": 256}),
    "decode h256 splits": (None, [3000, 5], {"heads": (8, 2, 256), "split_tokens": 512}),
    "decode beyond 2^32 elements": (None, [1000, 77, 0, 512], {"far": True}),
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
    "prefill beyond 2^32 elements": ([600, 100], [700, 1000], {"far": True}),
}  # fmt: skip


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    checks = {name: functools.partial(check, *case) for name, case in CHECKS.items()}
    return checks | decode_timings() | prefill_timings()


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
        first = jnp.array([fields.get("first", 0)], jnp.int32)
        out = prefill_attention(q, *cache, lens, jnp.asarray(starts, jnp.int32), first, **options)
    out = np.asarray(out.astype(jnp.float32))
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


def decode_timings() -> dict[str, Any]:
    tunings = {
        "heads_together": DecodeTuningConfig(block_tokens=64, num_stages=4, heads_together=True),
        "block 128 stages 2": DecodeTuningConfig(block_tokens=128, num_stages=2),
        "stages 5": DecodeTuningConfig(block_tokens=64, num_stages=5),
    }
    cases = {
        f"time decode batch {batch} context {context}": functools.partial(
            time_decode, batch, context
        )
        for batch in (8, 64, 256)
        for context in (1024, 4096)
    }
    for name, tuning in tunings.items():
        for batch in (8, 64, 256):
            cases[f"time decode batch {batch} context 1024 {name}"] = functools.partial(
                time_decode, batch, 1024, tuning
            )
    return cases


def time_decode(batch: int, context: int, tuning: DecodeTuningConfig | None = None):
    keys, values, table = timed_cache(batch, context)
    q = random_array(3, (batch, 32, 128), "bfloat16")

    def call(q, layer, keys, values, table, lens):
        return decode_attention(q, keys, values, layer, table, lens, scale=128**-0.5, tuning=tuning)

    lens = jnp.full(batch, context, jnp.int32)
    calls = 200 if batch * context < 2**18 else 40
    seconds = seconds_a_call(call, q, keys, values, table, lens, calls=calls, layers=LAYERS)
    bytes_read = batch * context * 8 * 128 * 2 * 2
    return {
        "microseconds": round(seconds * 1e6, 2),
        "gigabytes_per_second": round(bytes_read / seconds / 1e9),
        "share_of_copy_ceiling": round(bytes_read / seconds / COPY_BYTES_PER_SECOND, 3),
    }


def prefill_timings() -> dict[str, Any]:
    return {
        "time prefill 2048": functools.partial(time_prefill, 2048, 0),
        "time prefill 8192": functools.partial(time_prefill, 8192, 0),
        "time prefill 2048 on 6144": functools.partial(time_prefill, 2048, 6144),
        "time prefill 8192 on 24576": functools.partial(time_prefill, 8192, 24576),
        "time prefill 8192 block 64 stages 4": functools.partial(
            time_prefill, 8192, 0, PrefillTuningConfig(block_tokens=64, num_stages=4)
        ),
        "time prefill 8192 block 128 one warpgroup": functools.partial(
            time_prefill,
            8192,
            0,
            PrefillTuningConfig(block_tokens=128, num_stages=2, compute_warpgroups=1),
        ),
    }


def time_prefill(num_tokens: int, prefix: int, tuning: PrefillTuningConfig | None = None):
    keys, values, table = timed_cache(1, prefix + num_tokens)
    q = random_array(3, (num_tokens, 32, 128), "bfloat16")

    def call(q, layer, keys, values, table, lens, starts, first):
        return prefill_attention(
            q, keys, values, layer, table, lens, starts, first, scale=128**-0.5, tuning=tuning
        )

    numbers = [jnp.array(x, jnp.int32) for x in ([prefix + num_tokens], [0, num_tokens], [0])]
    seconds = seconds_a_call(call, q, keys, values, table, *numbers, calls=10, layers=LAYERS)
    pairs = num_tokens * prefix + num_tokens * (num_tokens + 1) // 2
    return {
        "milliseconds": round(seconds * 1e3, 3),
        "teraflops_per_second": round(4 * 32 * 128 * pairs / seconds / 1e12, 1),
    }
