"""Attention and rotary_write by Triton: agreement with the reference, then time.

On a Hopper GPU Triton makes other code than for the capabilities it is meant for. So most cases
run with the code of capability 8.0, which runs on every later GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases import attention, decode, fused
from benchmarks.kernel_cases.attention import FLOPS_PER_SECOND, LAYERS, timed_cache
from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array, seconds_a_call
from pallas_kernels.triton_gpu.triton_decode import TritonDecodeTuning, decode_attention
from pallas_kernels.triton_gpu.triton_launch import import_jax_triton
from pallas_kernels.triton_gpu.triton_prefill import TritonPrefillTuning, prefill_attention
from pallas_kernels.triton_gpu.triton_rotary_write import rotary_write

OLDER = 80  # capability whose code runs on every later GPU
TABLE_TOKENS = 4096  # that a row of a timed page table can hold, as in an engine

# query heads, tokens in cache by row
DECODE_TIMINGS: dict[str, tuple[int, list[int]]] = {
    "8 rows context 1024": (32, [1024] * 8),
    "1 of 8 rows context 512": (16, [512, *[0] * 7]),
    "64 rows context 1024": (32, [1024] * 64),
    "256 rows context 576": (32, [576] * 256),
}
DECODE_VARIANTS: dict[str, dict[str, int]] = {
    "stages 5": {"num_stages": 5},
    "stages 2": {"num_stages": 2},
    "block 32 stages 5": {"block_tokens": 32, "num_stages": 5},
    "block 128": {"block_tokens": 128},
    "warps 8": {"num_warps": 8},
    "warps 2": {"num_warps": 2},
    "programs 512": {"num_programs": 512},
    "programs 2048": {"num_programs": 2048, "min_split_tokens": 128},
}
# rows, new tokens of each
PREFILL_TIMINGS = {"8192": (1, 8192), "16x512": (16, 512)}
PREFILL_VARIANTS: dict[str, dict[str, int]] = {
    "stages 3": {"num_stages": 3},
    "stages 2": {"num_stages": 2},
    "warps 4": {"num_warps": 4},
    "tile 64 warps 4": {"tile_tokens": 64, "num_warps": 4},
    "block 32": {"block_tokens": 32},
    "block 128 stages 3": {"block_tokens": 128, "num_stages": 3},
}
DECODE_TUNING = TritonDecodeTuning(block_tokens=64, num_stages=3)
PREFILL_TUNING = TritonPrefillTuning(tile_tokens=128, block_tokens=64, num_stages=5, num_warps=8)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    checks = {name: (None, *case) for name, case in decode.CHECKS.items()}
    checks |= {name: case for name, case in attention.CHECKS.items() if "tuning" not in case[2]}
    for name, case in checks.items():
        if "h128 b16" in name or "far" in case[2]:
            found[f"triton {name}"] = functools.partial(by_triton, attention.check, *case)
        if "far" not in case[2]:
            found[f"triton as 8.0 {name}"] = functools.partial(
                as_older, by_triton, attention.check, *case
            )
    for name, fields in fused.ROTARY_CHECKS.items():
        run = functools.partial(by_triton, fused.check_rotary_write, **fields)
        found[f"triton as 8.0 rotary_write {name}"] = functools.partial(as_older, run)
    for tokens in (8, 256, 8192):
        run = functools.partial(by_triton, fused.time_rotary_write, "8B", tokens, 0)
        found[f"time triton as 8.0 rotary_write {tokens}"] = functools.partial(as_older, run)
    for name, case in DECODE_TIMINGS.items():
        found[f"time triton decode {name}"] = functools.partial(time_decode, *case)
        found[f"time triton as 8.0 decode {name}"] = functools.partial(as_older, time_decode, *case)
    for name, case in PREFILL_TIMINGS.items():
        found[f"time triton prefill {name}"] = functools.partial(time_prefill, *case)
        found[f"time triton as 8.0 prefill {name}"] = functools.partial(
            as_older, time_prefill, *case
        )
    for variant, changes in DECODE_VARIANTS.items():
        tuning = replace(DECODE_TUNING, **changes)
        run = functools.partial(time_decode, 32, [1024] * 64, tuning)
        found[f"time triton variant as 8.0 decode 64x1024 {variant}"] = functools.partial(
            as_older, run
        )
    for variant, changes in PREFILL_VARIANTS.items():
        run = functools.partial(time_prefill, 1, 8192, replace(PREFILL_TUNING, **changes))
        found[f"time triton variant as 8.0 prefill 8192 {variant}"] = functools.partial(
            as_older, run
        )
    return found


def by_triton(run: Callable[..., dict[str, Any]], *args: Any, **fields: Any) -> dict[str, Any]:
    """A case of Mosaic's kernels by the Triton ones."""

    def prefill(*args: Any, tuning: Any, **options: Any) -> jax.Array:
        return prefill_attention(*args, **options)

    def write(*args: Any, dependent_launch: bool = False, tuning: Any = None, **options: Any):
        return rotary_write(*args, **options)

    with (
        mock.patch.object(attention, "decode_attention", decode_attention),
        mock.patch.object(attention, "prefill_attention", prefill),
        mock.patch.object(fused, "rotary_write", write),
    ):
        return run(*args, **fields)


def as_older(run: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run a case with code for capability 8.0."""
    with older_code():
        return run(*args)


@contextlib.contextmanager
def older_code() -> Iterator[None]:
    """Let jax-triton 0.3 make PTX for capability 8.0, and the driver's assembler take it as it is.

    The two patched functions are what it asks for the device and what it makes of the PTX.
    """
    library = import_jax_triton().triton_lib.triton_kernel_call_lib
    capability, kernel = library.get_compute_capability(0), library.TritonKernel
    jax.clear_caches()
    with (
        mock.patch.object(library, "get_compute_capability", lambda device: OLDER),
        mock.patch.object(library, "TritonKernel", lambda *args: kernel(*args[:-1], capability)),
    ):
        yield
    jax.clear_caches()


def time_decode(
    num_heads: int, seq_lens: list[int], tuning: TritonDecodeTuning = DECODE_TUNING
) -> dict[str, Any]:
    """One layer, 8 KV heads of 128."""
    num_rows = len(seq_lens)
    real_rows = sum(length > 0 for length in seq_lens)
    keys, values, table = timed_cache(real_rows, max(seq_lens))
    more = TABLE_TOKENS // 16 - table.shape[1]
    table = jnp.pad(table, ((0, num_rows - real_rows), (0, more)))
    q = random_array(3, (num_rows, num_heads, 128), "bfloat16")
    lens = jnp.asarray(seq_lens, jnp.int32)

    def call(q, _, keys, values, table, lens):
        for turn in range(2 * LAYERS):  # so that the loop's own kernels hardly count
            layer = jnp.full(1, turn % LAYERS, jnp.int32)
            q = decode_attention(
                q, keys, values, layer, table, lens, scale=128**-0.5, tuning=tuning
            )
        return q

    loops = 30 if sum(seq_lens) < 2**17 else 6
    others = (keys, values, table, lens)
    seconds = seconds_a_call(call, q, *others, calls=loops, layers=LAYERS) / (2 * LAYERS)
    bytes_read = sum(seq_lens) * 8 * 128 * 2 * 2
    return {
        "microseconds": round(seconds * 1e6, 2),
        "gigabytes_per_second": round(bytes_read / seconds / 1e9),
        "share_of_copy_ceiling": round(bytes_read / seconds / COPY_BYTES_PER_SECOND, 3),
    }


def time_prefill(
    num_rows: int, num_tokens: int, tuning: TritonPrefillTuning = PREFILL_TUNING
) -> dict[str, Any]:
    """One layer, 32 query heads and 8 KV heads of 128; the plan of its tiles included."""
    keys, values, table = timed_cache(num_rows, num_tokens)
    q = random_array(3, (num_rows * num_tokens, 32, 128), "bfloat16")
    lens = jnp.full(num_rows, num_tokens, jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * num_tokens
    first = jnp.zeros(1, jnp.int32)

    def call(q, layer, keys, values, *others):
        return prefill_attention(q, keys, values, layer, *others, scale=128**-0.5, tuning=tuning)

    others = (keys, values, table, lens, starts, first)
    seconds = seconds_a_call(call, q, *others, calls=10, layers=LAYERS)
    flops = 4 * 32 * 128 * num_rows * (num_tokens * (num_tokens + 1) // 2)
    return {
        "microseconds": round(seconds * 1e6, 1),
        "teraflops_per_second": round(flops / seconds / 1e12, 1),
        "share_of_limit": round(flops / FLOPS_PER_SECOND / seconds, 3),
    }
