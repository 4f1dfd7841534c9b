"""What the Mosaic GPU attention kernels share: limits, checks, logits and masked values."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cacheable_kernels import make_kernels_cacheable

make_kernels_cacheable()

STORED_HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
TILE_ROWS = 64  # rows of one WGMMA
MASKED = -1e30  # a logit that no key has; finite, so that MASKED - MASKED is not NaN
# Above MASKED times any scale. Where a row has only masked keys yet, the highest stays at it, so
# that their weights are 0: of two equal huge numbers, one in a fused multiply-add is not rounded.
LOWEST = -1e20
LOG2_E = math.log2(math.e)

# What WGMMA reads from shared memory.
TILED: Any = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)

# Rows lie within warps, so the sums over columns need no shared memory of their own.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    reduction_scratch_bytes=0,
)


def check_mosaic_inputs(q: jax.Array, k_pages: jax.Array) -> None:
    """Refuse what the Mosaic GPU attention kernels cannot read.

    Raises:
      ValueError: dtype, head dim, page size or heads a KV head.
    """
    _, _, page_size, num_kv_heads, head_dim = k_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype:
        raise ValueError(
            "q and pages must both be bfloat16 or both float16; "
            f"got {q.dtype} and {k_pages.dtype}; use the xla backend"
        )
    if head_dim not in STORED_HEAD_DIMS:
        raise ValueError(f"stored head dim must be one of {STORED_HEAD_DIMS}; got {head_dim}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page size must be one of {PAGE_SIZES}; got {page_size}")
    if q.shape[1] // num_kv_heads > TILE_ROWS:
        raise ValueError(
            f"query heads a KV head must be at most {TILE_ROWS}; got {q.shape[1] // num_kv_heads}"
        )


def to_log2(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """From q @ k to logits in base 2, so that softmax takes exp2."""
    if soft_cap is None:
        return products * (scale * LOG2_E)
    # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1): the hardware's own tanh has but 11 bits.
    slope, cap = 2 * scale / soft_cap * LOG2_E, soft_cap * LOG2_E
    return cap - (2 * cap) / (jnp.exp2(products * slope) + 1)


def zero_values_outside(values: Any, first: jax.Array, end: jax.Array) -> None:
    """Zero the rows of a V tile outside `[first, end)`: a weight of 0 times NaN would be NaN."""
    block, head_dim = values.shape
    width = min(head_dim, 128)
    for start in range(0, block, TILE_ROWS):

        @pl.when((first > start) | (end < start + TILE_ROWS))
        def _zero(start=start):
            shape = (TILE_ROWS, width)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + start
            for column in range(0, head_dim, width):  # in parts: registers are scarce
                part = values.at[pl.ds(start, TILE_ROWS), pl.ds(column, width)]
                loaded = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                part[...] = jnp.where((key >= first) & (key < end), loaded, jnp.zeros_like(loaded))
            plgpu.commit_smem()
