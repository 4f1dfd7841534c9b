"""Paged prefill attention in Triton, for NVIDIA GPUs without WGMMA: prompts and chunks."""

import functools
from dataclasses import dataclass

import jax

from pallas_kernels.attention.paged_inputs import check_paged_inputs, plan_prefill_tiles
from pallas_kernels.triton_gpu.triton_launch import check_triton_inputs, import_jax_triton, launch


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPrefillTuning:
    """Sizes of the kernel.

    Attributes:
      tile_tokens: queries a program, a power of two.
      block_tokens: keys a block, a power of two.
      num_stages: of the loop over blocks; page ids and then keys take two each, so that 5 hold two
        blocks of K and V in shared memory, and 3 one.
      num_warps: of a program.
    """

    tile_tokens: int
    block_tokens: int
    num_stages: int
    num_warps: int


# Chosen so that the tiles fit into the 99 KiB of shared memory of capabilities 8.6 and 8.9.
_BY_HEAD_DIM = {
    64: TritonPrefillTuning(tile_tokens=128, block_tokens=64, num_stages=5, num_warps=4),
    128: TritonPrefillTuning(tile_tokens=128, block_tokens=64, num_stages=5, num_warps=8),
    256: TritonPrefillTuning(tile_tokens=64, block_tokens=32, num_stages=3, num_warps=8),
}


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "tuning"))
def prefill_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    first_row: jax.Array,
    decoded: jax.Array | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tuning: TritonPrefillTuning | None = None,
) -> jax.Array:
    """Attend the queries of rows `first_row[0]` and later to their cached pages, causally.

    Row s has the tokens `[query_start_loc[s], query_start_loc[s + 1])`; the last of them stands
    at position `seq_lens[s] - 1`. K and V of this step's tokens are already in the pages.

    Args:
      q: [T, N, H] bfloat16 or float16, already rotated.
      k_pages: [L, P, B, K, H] in q's dtype, all pages of all layers.
      v_pages: as k_pages.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; entries past a row's end, and those before its window, are not
        read. Slots past a row's end may hold anything, NaN too.
      seq_lens: [S] int32, tokens in cache, this step's included.
      query_start_loc: [S + 1] int32, cumulative query offsets; a row may have no query.
      first_row: [1] int32; the rows before it (decode rows) are another kernel's.
      decoded: [D, N, H] in q's dtype, results for the first D tokens; those of the rows before
        `first_row[0]` are copied to the output. They must not be more than D. None = zeros.
      scale: multiplies the logits.
      sliding_window: a query at position p sees the keys `(p - sliding_window, p]`; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      [T, N, H] in q's dtype; zero for the tokens of no row.

    Raises:
      ValueError: shapes, dtypes, head dim or heads do not fit, or jax-triton is not installed.

    Source: Kwon et al. 2023 (paged attention); Dao 2023 (FlashAttention-2).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    check_triton_inputs(q, k_pages)
    if decoded is not None and (decoded.shape[1:] != q.shape[1:] or decoded.dtype != q.dtype):
        raise ValueError(
            f"decoded must be [D, {q.shape[1]}, {q.shape[2]}] {q.dtype}; "
            f"got {decoded.shape=} {decoded.dtype}"
        )
    import_jax_triton()
    from pallas_kernels.triton_gpu import triton_prefill_kernels as kernels

    num_tokens, num_heads, head_dim = q.shape
    _, num_pages, page_size, num_kv_heads, _ = k_pages.shape
    tuning = tuning or _BY_HEAD_DIM[head_dim]
    tiles, counts = plan_prefill_tiles(
        query_start_loc,
        first_row,
        seq_lens,
        num_tokens=num_tokens,
        tile_tokens=tuning.tile_tokens,
        alignment=1,
    )
    return launch(
        q,
        k_pages,
        v_pages,
        layer,
        page_table,
        tiles,
        counts,
        q if decoded is None else decoded,  # never read without decoded rows
        tiles.shape[0],
        num_tokens,
        0 if decoded is None else decoded.shape[0],
        kernel=kernels.prefill_kernel,
        out=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_heads, tiles.shape[0] + -(-num_tokens // tuning.tile_tokens)),
        SCALE=scale,
        WINDOW=sliding_window,
        SOFT_CAP=soft_cap,
        GROUP=num_heads // num_kv_heads,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        LAYER_STRIDE=num_pages * page_size * num_kv_heads * head_dim,
        MAX_PAGES=page_table.shape[1],
        TILE=tuning.tile_tokens,
        BLOCK=tuning.block_tokens,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
