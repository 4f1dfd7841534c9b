"""Attention and rotary_write by Triton: agreement with the reference, then time.

On a Hopper GPU Triton makes other code than for the capabilities it is meant for. So most cases
run with the code of capability 8.0, which runs on every later GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases import attention, decode, fused
from benchmarks.kernel_cases.attention import FLOPS_PER_SECOND, LAYERS, timed_cache
from benchmarks.kernel_cases.timing import COPY_BYTES_PER_SECOND, random_array, seconds_a_call
from pallas_kernels.triton_gpu.triton_decode import decode_attention
from pallas_kernels.triton_gpu.triton_launch import import_jax_triton
from pallas_kernels.triton_gpu.triton_prefill import prefill_attention
from pallas_kernels.triton_gpu.triton_rotary_write import rotary_write

OLDER = 80  # capability whose code runs on every later GPU
TABLE_TOKENS = 4096  # that a row of a timed page table can hold, as in an engine

# Of the attention checks, by the GPU's own code and by that of capability 8.0.
CHECKS = (
    "decode g4 h128 b16", "prefill ragged h128 b16",
    "decode beyond 2^32 elements", "prefill beyond 2^32 elements",
)  # fmt: skip
OLDER_CHECKS = (
    "decode g4 h128 b16", "decode g3 h64 b16 fp16", "decode g1 h256 b128", "decode g64 h128 b32",
    "decode window 1000 h128", "decode split_tokens window", "prefill ragged h128 b16",
    "prefill g3 h64 fp16", "prefill g1 h256 b128", "prefill window cap h256",
    "prefill decoded rows",
)  # fmt: skip
ROTARY_CHECKS = ("qwen3", "qwen2 bias", "phi3 h96", "phi4 part of h128")
DECODE_TIMINGS = {"8 rows context 1024": [1024] * 8, "64 rows context 1024": [1024] * 64}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing."""
    checks = {name: (None, *case) for name, case in decode.CHECKS.items()} | attention.CHECKS
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"triton {name}": functools.partial(by_triton, attention.check, *checks[name])
        for name in CHECKS
    }
    older: dict[str, Callable[[], dict[str, Any]]] = {
        f"triton as 8.0 {name}": functools.partial(by_triton, attention.check, *checks[name])
        for name in OLDER_CHECKS
    }
    for name in ROTARY_CHECKS:
        older[f"triton as 8.0 rotary_write {name}"] = functools.partial(
            by_triton, fused.check_rotary_write, **fused.ROTARY_CHECKS[name]
        )
    for tokens in (8, 8192):
        older[f"time triton as 8.0 rotary_write {tokens}"] = functools.partial(
            by_triton, fused.time_rotary_write, "8B", tokens, 0
        )
    for name, seq_lens in DECODE_TIMINGS.items():
        older[f"time triton as 8.0 decode {name}"] = functools.partial(time_decode, seq_lens)
    older["time triton as 8.0 prefill 8192"] = functools.partial(time_prefill, 8192)
    return found | {name: functools.partial(as_older, case) for name, case in older.items()}


def by_triton(run: Callable[..., dict[str, Any]], *args: Any, **fields: Any) -> dict[str, Any]:
    """A case of Mosaic's kernels by the Triton ones."""

    def prefill(*args: Any, tuning: Any, **options: Any) -> jax.Array:
        return prefill_attention(*args, **options)

    with (
        mock.patch.object(attention, "decode_attention", decode_attention),
        mock.patch.object(attention, "prefill_attention", prefill),
        mock.patch.object(fused, "rotary_write", rotary_write),
    ):
        return run(*args, **fields)


def as_older(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a case with code for capability 8.0."""
    with older_code():
        return run()


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


def time_decode(seq_lens: list[int]) -> dict[str, Any]:
    """One layer, 32 query heads and 8 KV heads of 128."""
    keys, values, table = timed_cache(len(seq_lens), max(seq_lens))
    table = jnp.pad(table, ((0, 0), (0, TABLE_TOKENS // 16 - table.shape[1])))
    q = random_array(3, (len(seq_lens), 32, 128), "bfloat16")
    lens = jnp.asarray(seq_lens, jnp.int32)

    def call(q, _, keys, values, table, lens):
        for turn in range(2 * LAYERS):  # so that the loop's own kernels hardly count
            layer = jnp.full(1, turn % LAYERS, jnp.int32)
            q = decode_attention(q, keys, values, layer, table, lens, scale=128**-0.5)
        return q

    others = (keys, values, table, lens)
    seconds = seconds_a_call(call, q, *others, calls=30, layers=LAYERS) / (2 * LAYERS)
    bytes_read = sum(seq_lens) * 8 * 128 * 2 * 2
    return {
        "microseconds": round(seconds * 1e6, 2),
        "gigabytes_per_second": round(bytes_read / seconds / 1e9),
        "share_of_copy_ceiling": round(bytes_read / seconds / COPY_BYTES_PER_SECOND, 3),
    }


def time_prefill(num_tokens: int) -> dict[str, Any]:
    """One row, 32 query heads and 8 KV heads of 128; the plan of its tiles included."""
    keys, values, table = timed_cache(1, num_tokens)
    q = random_array(3, (num_tokens, 32, 128), "bfloat16")
    lens = jnp.full(1, num_tokens, jnp.int32)
    starts = jnp.arange(2, dtype=jnp.int32) * num_tokens
    first = jnp.zeros(1, jnp.int32)

    def call(q, layer, keys, values, *others):
        return prefill_attention(q, keys, values, layer, *others, scale=128**-0.5)

    others = (keys, values, table, lens, starts, first)
    seconds = seconds_a_call(call, q, *others, calls=10, layers=LAYERS)
    flops = 4 * 32 * 128 * (num_tokens * (num_tokens + 1) // 2)
    return {
        "microseconds": round(seconds * 1e6, 1),
        "teraflops_per_second": round(flops / seconds / 1e12, 1),
        "share_of_limit": round(flops / FLOPS_PER_SECOND / seconds, 3),
    }
