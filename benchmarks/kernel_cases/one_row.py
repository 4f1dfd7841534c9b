"""One kernel for rotary embedding, write and attention of few rows: agreement, then time."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.fused import index, seconds_a_fused_call
from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array
from pallas_kernels.attention.decode_attention import decode_attention
from pallas_kernels.attention.decode_plan import plan_decode
from pallas_kernels.attention.one_row_attention import (
    OneRowTuning,
    choose_one_row_tuning,
    rotary_decode,
)
from pallas_kernels.attention.reference import paged_attention
from pallas_kernels.fused.rotary_write import rotary_write

TOLERANCE = 1e-2
PARTS = 6  # of the qkv product
REPEATS = 50
ROTATED_BYTES = 100e6  # of keys and values that calls take turns over, so that L2 cannot serve them

# model -> (K, G, H, has q and k norm)
MODELS = {"0.6B": (8, 2, 128, True), "8B": (8, 4, 128, False)}
CONTEXTS = (1, 17, 128, 384, 2000, 32000)
TIMED_CONTEXTS = (128, 384, 2048, 8192, 32768)
# name -> (heads and norm, tokens by row, fields of `make_inputs` and options)
OTHERS: dict[str, tuple[tuple[int, int, int, bool], list[int], dict[str, Any]]] = {
    "window 100": (MODELS["8B"], [2000], {"sliding_window": 100}),
    "window 4096 cap": (MODELS["0.6B"], [9000], {"sliding_window": 4096, "soft_cap": 30.0}),
    "4 rows": (MODELS["8B"], [3000, 0, 17, 512], {}),
    "g7 h64 bias": ((2, 7, 64, False), [900], {"has_bias": True}),
    "g3 h64 fp16": ((3, 3, 64, False), [1500], {"dtype": "float16"}),
    "g2 h256 b64": ((4, 2, 256, False), [1300], {"page_size": 64}),
    "g8 h128 b128 whole": ((4, 8, 128, True), [5000], {"page_size": 128, "parts": 0}),
    "g1 h96": ((32, 1, 96, False), [700], {}),
    "g4 h128 k1": ((1, 4, 128, False), [20000], {}),
}  # fmt: skip
# Changes of the tuning that are timed.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tile 16": {"tile_tokens": 16, "lone_rounds": 4},
    "tile 64": {"tile_tokens": 64, "lone_rounds": 1},
    "lone 1": {"lone_rounds": 1},
    "lone 4": {"lone_rounds": 4},
    "4 a cluster": {"cluster_blocks": 4, "clusters": 8},
    "no clusters": {"cluster_blocks": 1, "clusters": 32},
    "2 clusters": {"clusters": 2},
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing; "one row check", "one row time"."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for (model, heads), context in itertools.product(MODELS.items(), CONTEXTS):
        found[f"one row check {model} context {context}"] = functools.partial(
            check, heads, [context]
        )
    for name, (heads, lens, fields) in OTHERS.items():
        found[f"one row check {name}"] = functools.partial(check, heads, lens, **fields)
    for variant, changes in VARIANTS.items():
        found[f"one row check variant {variant}"] = functools.partial(
            check, MODELS["8B"], [2000], changes=changes
        )
    for (model, heads), context in itertools.product(MODELS.items(), TIMED_CONTEXTS):
        name = f"one row time {model} context {context}"
        found[f"{name} two kernels"] = functools.partial(time_two, heads, context)
        for variant, changes in VARIANTS.items():
            found[f"{name} {variant}"] = functools.partial(time_one, heads, context, changes)
    found["one row time 8B 4 rows context 384 two kernels"] = functools.partial(
        time_two, MODELS["8B"], 384, 4
    )
    found["one row time 8B 4 rows context 384 as it is"] = functools.partial(
        time_one, MODELS["8B"], 384, {}, 4
    )
    return found


def make_inputs(
    heads: tuple[int, int, int, bool],
    lens: list[int],
    *,
    layers: int = 2,
    page_size: int = 16,
    parts: int = PARTS,
    dtype: str = "bfloat16",
    has_bias: bool = False,
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Positional arrays and options of `rotary_decode`; pages lie in a random order."""
    K, G, H, has_norm = heads
    stored = next(size for size in (64, 128, 256) if size >= H)
    rows, width = len(lens), K * (G + 2) * H
    width_in_pages = -(-max(lens) // page_size)
    order = 1 + np.random.default_rng(0).permutation(rows * width_in_pages)
    table = order.reshape(rows, width_in_pages)
    slots = [
        table[row, (length - 1) // page_size] * page_size + (length - 1) % page_size
        if length
        else row
        for row, length in enumerate(lens)
    ]
    shape = (layers, 1 + table.size, page_size, K, stored)
    angles = random_array(5, (rows, H // 2), "float32")
    qkv = random_array(1, (parts, rows, width), "float32") if parts else None
    options: dict[str, Any] = {"num_kv_heads": K, "head_dim": H, "eps": 1e-6}
    if has_bias:
        options["bias"] = random_array(8, (layers, width), dtype)
    if has_norm:
        options |= {f"{x}_gains": random_array(9, (layers, H), dtype) for x in "qk"}
    return (
        random_array(1, (rows, width), dtype) if qkv is None else qkv,
        *(random_array(seed, shape, dtype) for seed in (6, 7)),
        index(1),
        index(layers - 1),
        jnp.asarray(slots, jnp.int32),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(lens, jnp.int32),
    ), options  # fmt: skip


def check(
    heads: tuple[int, int, int, bool],
    lens: list[int],
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    changes: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The pages of `rotary_write` to the bit, attention as in float32, the same bits each time."""
    arrays, options = make_inputs(heads, lens, **fields)
    max_tokens = arrays[8].shape[1] * arrays[1].shape[2]
    tuning = _tuning(heads, len(lens), max_tokens, changes or {})
    masks = {"scale": heads[2] ** -0.5, "sliding_window": sliding_window, "soft_cap": soft_cap}
    run = functools.partial(rotary_decode, **options, **masks, tuning=tuning)
    out, *pages = run(*arrays)
    outs = [run(*arrays)[0] for _ in range(REPEATS)]
    is_steady = all(bool(jnp.array_equal(other, out)) for other in outs)
    q, *written = rotary_write(*arrays[:8], **options)
    is_same = all(bool(jnp.array_equal(x, y)) for x, y in zip(pages, written, strict=True))
    attended = decode_attention(q, *written, arrays[4], *arrays[8:], **masks)
    starts = jnp.arange(len(lens) + 1, dtype=jnp.int32)
    exact = functools.partial(paged_attention, **masks)
    want = jax.jit(exact)(q.astype(jnp.float32), *written, arrays[4], *arrays[8:], starts)
    is_real = np.asarray(lens) > 0

    def error(got: jax.Array, want: jax.Array) -> float:
        x, y = (np.asarray(z, np.float32)[is_real] for z in (got, want))
        worst = np.linalg.norm(x - y, axis=(1, 2)) / np.linalg.norm(y, axis=(1, 2))
        return float(np.where(np.isfinite(worst), worst, np.inf).max())

    is_padding_zero = not np.asarray(out, np.float32)[~is_real].any()
    errors = error(out, want), error(attended, want)
    return {
        "ok": errors[0] < TOLERANCE and is_same and is_steady and is_padding_zero,
        "relative_error": errors[0],
        "relative_error_of_two_kernels": errors[1],
        "pages_are_same": is_same,
        "is_steady": is_steady,
        "is_padding_zero": is_padding_zero,
    }


def _tuning(
    heads: tuple[int, int, int, bool], rows: int, max_tokens: int, changes: dict[str, Any]
) -> OneRowTuning:
    return replace(choose_one_row_tuning(rows, heads[0], max_tokens), **changes)


def time_one(
    heads: tuple[int, int, int, bool], context: int, changes: dict[str, Any], rows: int = 1
) -> dict[str, Any]:
    """The one kernel, a layer after the other."""
    tuning = _tuning(heads, rows, context, changes)

    def call(arrays, options, layer):
        qkv, k_pages, v_pages, _, _, *others = arrays
        return rotary_decode(
            qkv, k_pages, v_pages, index(layer), index(layer), *others,
            scale=0.1, tuning=tuning, **options,
        )  # fmt: skip

    return _time(call, heads, context, rows)


def time_two(heads: tuple[int, int, int, bool], context: int, rows: int = 1) -> dict[str, Any]:
    """`rotary_write` and `decode_attention`, whose plan is made once a step."""

    def call(arrays, options, layer):
        qkv, k_pages, v_pages, _, _, *others = arrays
        *places, table, lens = others
        q, k_pages, v_pages = rotary_write(
            qkv, k_pages, v_pages, index(layer), index(layer), *places, **options
        )
        plan = plan_decode(
            lens, num_kv_heads=heads[0], head_dim=heads[2], dtype="bfloat16",
            max_tokens=table.shape[1] * 16,
        )  # fmt: skip
        out = decode_attention(q, k_pages, v_pages, index(layer), table, lens, scale=0.1, plan=plan)
        return out, k_pages, v_pages

    return _time(call, heads, context, rows)


def _time(
    call: Callable[..., Any], heads: tuple[int, int, int, bool], context: int, rows: int
) -> dict[str, Any]:
    num_bytes = rows * context * heads[0] * heads[2] * 2 * 2
    layers = min(128, max(16, round(ROTATED_BYTES / num_bytes)))
    arrays, options = make_inputs(heads, [context] * rows, layers=layers)
    weights = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    sizes = {name: x for name, x in options.items() if name not in weights}

    def all_layers(state, _):
        (qkv, k_pages, v_pages, *others), weights = state
        outs = []
        for layer in range(layers):
            out, k_pages, v_pages = call(
                (qkv, k_pages, v_pages, *others), {**weights, **sizes}, layer
            )
            outs.append(out)
        return ((qkv, k_pages, v_pages, *others), weights), tuple(outs)

    seconds = seconds_a_fused_call(all_layers, (arrays, weights), 1) / layers
    return {
        "microseconds": round(seconds * 1e6, 2),
        "share_of_copy_ceiling": round(num_bytes / seconds / COPY_BYTES_PER_SECOND, 3),
    }
