"""The fused elementwise kernels: agreement with their jnp versions, then time beside these."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array
from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.add_norm import add_norm
from pallas_kernels.fused.fused_inputs import Activation, total
from pallas_kernels.fused.gated_activation import gated_activation
from pallas_kernels.fused.kv_write import write_by_scatter
from pallas_kernels.fused.rotary_write import rotary_write

TOLERANCE = 0.01
LAYERS = 4  # of the stacked weights and pages
PAGE_SIZE = 16

# name -> (D, K, G, H, F)
MODELS = {"0.6B": (1024, 8, 2, 128, 3072), "8B": (4096, 8, 4, 128, 14336)}
# (model, tokens, parts of the product; 0 = whole)
TIMES = [("0.6B", 8, 8), ("0.6B", 64, 4), ("0.6B", 256, 0), ("0.6B", 8192, 0), ("8B", 8192, 0)]

# name -> fields of check_add_norm
NORM_CHECKS: dict[str, dict[str, Any]] = {
    "d1024 parts": {"tokens": 8, "width": 1024, "parts": 8},
    "d4096 parts": {"tokens": 77, "width": 4096, "parts": 4},
    "d576 odd tokens": {"tokens": 3, "width": 576, "parts": 2},
    "d896 fp16": {"tokens": 65, "width": 896, "dtype": "float16"},
    "d2304 gemma": {"tokens": 9, "width": 2304, "parts": 2, "is_gemma": True},
    "d3584 gemma": {"tokens": 1500, "width": 3584, "is_gemma": True},
    "d8192 many": {"tokens": 1025, "width": 8192},
    "d960 many": {"tokens": 1027, "width": 960},
    "d5120 no delta": {"tokens": 64, "width": 5120, "has_delta": False},
}
# name -> fields of check_rotary_write; heads = (K, G, H)
ROTARY_CHECKS: dict[str, dict[str, Any]] = {
    "llama parts": {"tokens": 8, "heads": (8, 4, 128), "parts": 8},
    "qwen3": {"tokens": 77, "heads": (8, 2, 128), "has_norm": True, "parts": 4},
    "qwen2 bias": {"tokens": 9, "heads": (2, 7, 64), "has_bias": True},
    "phi3 h96": {"tokens": 31, "heads": (32, 1, 96)},
    "phi4 part of h128": {"tokens": 1030, "heads": (8, 3, 128), "rotary_dim": 96},
    "gemma h256": {"tokens": 2000, "heads": (4, 2, 256), "dtype": "float16"},
    "smollm 3 tokens": {"tokens": 3, "heads": (3, 3, 64), "parts": 3},
    "many tokens": {"tokens": 4001, "heads": (8, 4, 128), "has_norm": True, "has_bias": True},
    "beyond 2^32 elements": {"tokens": 50, "heads": (8, 2, 128), "num_pages": 70_000},
}
# name -> fields of check_gated_activation
GATED_CHECKS: dict[str, dict[str, Any]] = {
    "f3072 parts": {"tokens": 8, "width": 3072, "parts": 8},
    "f14336": {"tokens": 64, "width": 14336},
    "f8960 parts": {"tokens": 9, "width": 8960, "parts": 4},
    "f9216 gelu fp16": {
        "tokens": 33, "width": 9216, "activation": "gelu_tanh", "dtype": "float16",
    },
    "f1544 odd": {"tokens": 3, "width": 1544, "activation": "gelu_tanh"},
    "f18944 many": {"tokens": 1030, "width": 18944},
}  # fmt: skip


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    checks = {
        "add_norm": (check_add_norm, NORM_CHECKS),
        "rotary_write": (check_rotary_write, ROTARY_CHECKS),
        "gated_activation": (check_gated_activation, GATED_CHECKS),
    }
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"fused {kernel} {name}": functools.partial(check, **fields)
        for kernel, (check, table) in checks.items()
        for name, fields in table.items()
    }
    found["fused rotary_write copies no pages"] = check_in_place
    for make in (time_add_norm, time_rotary_write, time_gated_activation):
        name = make.__name__.removeprefix("time_")
        for case in TIMES:
            label = "{} {} tokens {} parts".format(*case)
            found[f"time fused {name} {label}"] = functools.partial(make, *case)
    return found


def product(seed: int, tokens: int, width: int, parts: int, dtype: str) -> jax.Array:
    """A product's result, whole or in parts."""
    if not parts:
        return random_array(seed, (tokens, width), dtype)
    return random_array(seed, (parts, tokens, width), "float32")


def index(number: int) -> jax.Array:
    return jnp.array([number], jnp.int32)


def report(got: list[jax.Array], want: list[jax.Array], **facts: bool) -> dict[str, Any]:
    """The largest relative error of a row of any array; further facts must all hold."""
    errors = []
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(z, np.float32).reshape(-1, z.shape[-1]) for z in (x, y))
        norms = np.linalg.norm(y, axis=1)
        errors.append(float((np.linalg.norm(x - y, axis=1) / np.maximum(norms, 1e-6)).max()))
    is_close = all(error < TOLERANCE for error in errors)
    return {"ok": is_close and all(facts.values()), "relative_error": max(errors), **facts}


def check_add_norm(
    tokens: int,
    width: int,
    parts: int = 0,
    dtype: str = "bfloat16",
    is_gemma: bool = False,
    has_delta: bool = True,
) -> dict[str, Any]:
    x = random_array(1, (tokens, width), dtype)
    delta = product(2, tokens, width, parts, dtype) if has_delta else None
    gains, delta_gains = (random_array(seed, (3, width), dtype) for seed in (3, 4))
    options: dict[str, Any] = {"eps": 1e-5, "gain_offset": 1.0 if is_gemma else 0.0}
    options["delta_gains"] = delta_gains if is_gemma else None
    args = (x, delta, gains, index(2))
    got = add_norm(*args, **options)
    want = xla_fused.add_norm(*args, **options)  # jitted, XLA would leave out roundings
    return report(list(got), list(want))


def rotary_inputs(
    tokens: int,
    heads: tuple[int, int, int],
    parts: int,
    dtype: str = "bfloat16",
    rotary_dim: int | None = None,
    num_pages: int | None = None,
) -> tuple[jax.Array, ...]:
    """The arrays of `rotary_write`: bf16 pages filled with numbers, permuted slots."""
    K, G, H = heads
    stored = next(size for size in (64, 128, 256) if size >= H)
    used = -(-tokens // PAGE_SIZE) + 1
    count = used if num_pages is None else num_pages
    slots = np.random.default_rng(0).permutation((used - 1) * PAGE_SIZE)[:tokens]
    slots = slots + (count - used + 1) * PAGE_SIZE
    slots[-1] = 3  # a padding token's
    half = (H if rotary_dim is None else rotary_dim) // 2
    angles = random_array(5, (tokens, half), "float32")
    pages = (random_array(seed, (LAYERS, count, PAGE_SIZE, K, stored), dtype) for seed in (6, 7))
    qkv = product(1, tokens, K * (G + 2) * H, parts, dtype)
    return (
        qkv, *pages, index(1), index(LAYERS - 1), jnp.asarray(slots, jnp.int32), jnp.cos(angles),
        jnp.sin(angles),
    )  # fmt: skip


def check_rotary_write(
    tokens: int,
    heads: tuple[int, int, int],
    parts: int = 0,
    dtype: str = "bfloat16",
    rotary_dim: int | None = None,
    num_pages: int | None = None,
    has_bias: bool = False,
    has_norm: bool = False,
) -> dict[str, Any]:
    K, G, H = heads
    args = rotary_inputs(tokens, heads, parts, dtype, rotary_dim, num_pages)
    options: dict[str, Any] = {"num_kv_heads": K, "head_dim": H, "eps": 1e-6}
    if has_bias:
        options["bias"] = random_array(8, (3, K * (G + 2) * H), dtype)
    if has_norm:
        options["q_gains"], options["k_gains"] = (random_array(s, (3, H), dtype) for s in (9, 10))
    reference = functools.partial(xla_fused.rotary_write, write=write_by_scatter, **options)
    got = rotary_write(*args, **options)
    want = jax.jit(reference)(*args)
    layer, slots = LAYERS - 1, args[5]

    @jax.jit
    def compare(got, want, old):
        flat = [x.reshape(LAYERS, -1, *x.shape[3:]) for x in (got, want, old)]
        rest = jnp.ones(flat[0].shape[:2], bool).at[layer, slots].set(False)
        is_same = jnp.all((flat[0] == flat[2]) | ~rest[..., None, None])
        return flat[0][layer, slots], flat[1][layer, slots], is_same

    keys, values = (compare(got[i], want[i], args[i]) for i in (1, 2))
    is_same = bool(keys[2]) and bool(values[2])
    return report(
        [got[0], keys[0], values[0]], [want[0], keys[1], values[1]], other_slots_stay=is_same
    )


def check_in_place() -> dict[str, Any]:
    """A program whose pages are donated holds them once."""
    args = rotary_inputs(64, (8, 4, 128), 0, num_pages=2000)
    call = functools.partial(rotary_write, num_kv_heads=8, head_dim=128)
    compiled = jax.jit(call, donate_argnums=(1, 2)).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pages = 2 * args[1].nbytes
    return {
        "ok": memory.alias_size_in_bytes >= pages and memory.temp_size_in_bytes < pages // 8,
        "page_bytes": pages,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def check_gated_activation(
    tokens: int,
    width: int,
    parts: int = 0,
    dtype: str = "bfloat16",
    activation: Activation = "silu",
) -> dict[str, Any]:
    gate_up = product(1, tokens, 2 * width, parts, dtype)
    got = gated_activation(gate_up, dtype=dtype, activation=activation)
    whole = total(gate_up, 2, dtype).astype(jnp.float32)
    want = xla_fused.gated_activation(whole, dtype="float32", activation=activation)
    return report([got], [want])


def seconds_a_fused_call(call: Callable[[Any, int], Any], arrays: Any, calls: int) -> float:
    """Time of one of `calls` chained calls, repeated on the device.

    Args:
      call: (arrays, layer) -> (arrays for the next call, what else it made).
      arrays: pytree.
      calls: unrolled, so that the loop's own kernels hardly count.
    """
    repeats = 30

    def step(_, state):
        arrays, made = state
        new: list[Any] = []
        for number in range(calls):
            # Nothing may be fused, shared or hoisted across calls.
            arrays, _ = lax.optimization_barrier((arrays, new[-1:]))
            arrays, out = call(arrays, number % LAYERS)
            new.append(out)
        return arrays, tuple(new)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(arrays):
        made = jax.eval_shape(lambda arrays: call(arrays, 0)[1], arrays)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        return lax.fori_loop(0, repeats, step, (arrays, (zeros,) * calls))

    arrays, made = loop(arrays)
    seconds = []
    for _ in range(3):
        jax.block_until_ready((arrays, made))
        del made
        start = time.perf_counter()
        arrays, made = jax.block_until_ready(loop(arrays))
        seconds.append((time.perf_counter() - start) / (repeats * calls))
    return min(seconds)


def compare_times(
    kernel: Callable[[Any, int], Any],
    reference: Callable[[Any, int], Any],
    make_arrays: Callable[[], Any],
    tokens: int,
    num_bytes: int,
) -> dict[str, Any]:
    """Time of the kernel, its share of the copy ceiling, and time of the jnp version."""
    calls = 16 if tokens < 1024 else 4
    seconds, other = (
        seconds_a_fused_call(version, make_arrays(), calls) for version in (kernel, reference)
    )
    return {
        "microseconds": round(seconds * 1e6, 2),
        "share_of_copy_ceiling": round(num_bytes / seconds / COPY_BYTES_PER_SECOND, 3),
        "xla_microseconds": round(other * 1e6, 2),
    }


def product_bytes(tokens: int, width: int, parts: int) -> int:
    return tokens * width * (4 * parts or 2)


def time_add_norm(model: str, tokens: int, parts: int) -> dict[str, Any]:
    width = MODELS[model][0]
    gains = random_array(3, (LAYERS, width), "bfloat16")

    def call(version, arrays, layer):
        x, delta = arrays
        x, normed = version(x, delta, gains, index(layer), eps=1e-5)
        return (x, delta), normed

    return compare_times(
        functools.partial(call, add_norm),
        functools.partial(call, xla_fused.add_norm),
        lambda: (
            jnp.zeros((tokens, width), jnp.bfloat16),
            product(2, tokens, width, parts, "bfloat16") * 0.001,
        ),
        tokens,
        3 * tokens * width * 2 + product_bytes(tokens, width, parts),
    )


def time_rotary_write(model: str, tokens: int, parts: int) -> dict[str, Any]:
    _, K, G, H, _ = MODELS[model]
    gains = random_array(3, (LAYERS, H), "bfloat16") if model == "0.6B" else None  # Qwen3's norms

    def call(version, arrays, layer):
        qkv, k_pages, v_pages, _, _, *others = arrays
        q, k_pages, v_pages = version(
            qkv, k_pages, v_pages, index(layer), index(layer), *others,
            num_kv_heads=K, head_dim=H, q_gains=gains, k_gains=gains, eps=1e-6,
        )  # fmt: skip
        return (qkv, k_pages, v_pages, *arrays[3:]), q

    reference = functools.partial(xla_fused.rotary_write, write=write_by_scatter)
    return compare_times(
        functools.partial(call, rotary_write),
        functools.partial(call, reference),
        lambda: rotary_inputs(tokens, (K, G, H), parts),
        tokens,
        tokens * K * (G + 2) * H * 2
        + product_bytes(tokens, K * (G + 2) * H, parts)
        + tokens * H * 4,
    )


def time_gated_activation(model: str, tokens: int, parts: int) -> dict[str, Any]:
    width = MODELS[model][4]

    def call(version, gate_up, _):
        return gate_up, version(gate_up, activation="silu", dtype=jnp.bfloat16)

    return compare_times(
        functools.partial(call, gated_activation),
        functools.partial(call, xla_fused.gated_activation),
        lambda: product(2, tokens, 2 * width, parts, "bfloat16"),
        tokens,
        tokens * width * 2 + product_bytes(tokens, 2 * width, parts),
    )
