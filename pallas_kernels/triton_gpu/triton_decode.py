"""Paged decode attention in Triton, for NVIDIA GPUs without WGMMA: one new query a row."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.attention.paged_inputs import check_paged_inputs
from pallas_kernels.triton_gpu.triton_launch import check_triton_inputs, import_jax_triton, launch


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonDecodeTuning:
    """Sizes of the kernel.

    Attributes:
      block_tokens: keys a block, a power of two.
      num_stages: of the loop over blocks; page ids and then keys take two each, so that 5 hold two
        blocks of K and V in shared memory, and 3 one.
      num_warps: of a program.
      num_programs: that fill the GPU, several a multiprocessor; contexts are cut to get as many.
      min_split_tokens: contexts are cut into pieces of this length, or longer.
    """

    block_tokens: int
    num_stages: int
    num_warps: int = 4
    num_programs: int = 1024
    min_split_tokens: int = 256


# Chosen so that the blocks fit into the 99 KiB of shared memory of capabilities 8.6 and 8.9.
_BY_HEAD_DIM = {
    64: TritonDecodeTuning(block_tokens=64, num_stages=4),
    128: TritonDecodeTuning(block_tokens=64, num_stages=3),
    256: TritonDecodeTuning(block_tokens=32, num_stages=3),
}


@functools.partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "soft_cap", "split_tokens", "tuning"),
)
def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
    tuning: TritonDecodeTuning | None = None,
) -> jax.Array:
    """Attend each sequence's newest query to its cached pages.

    Each row's context is cut into pieces, so that few rows fill the GPU too; a second small kernel
    adds them up.

    Args:
      q: [S, N, H] bfloat16 or float16, one row a sequence, already rotated.
      k_pages: [L, P, B, K, H] in q's dtype, all pages of all layers.
      v_pages: as k_pages.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; entries past a sequence's end, and those before its window,
        are not read. Slots past a sequence's end may hold anything, NaN too.
      seq_lens: [S] int32, tokens in cache, this step's included; 0 = padding row.
      scale: multiplies the logits.
      sliding_window: the query sees this many keys, its own included; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      split_tokens: the context is cut at multiples of it, whatever the batch, so that a row's
        sums do not depend on who shares the batch; None = cut so that the GPU is filled.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      [S, N, H] in q's dtype; padding rows are zero.

    Raises:
      ValueError: shapes, dtypes, head dim, heads or `split_tokens` do not fit, or jax-triton is
        not installed.

    Source: Kwon et al. 2023 (paged attention); Dao et al. 2023 (Flash-Decoding).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    check_triton_inputs(q, k_pages)
    num_rows, num_heads, head_dim = q.shape
    _, num_pages, page_size, num_kv_heads, _ = k_pages.shape
    tuning = tuning or _BY_HEAD_DIM[head_dim]
    block = tuning.block_tokens
    if split_tokens is not None and (split_tokens < 1 or split_tokens % block):
        raise ValueError(f"split_tokens must be a positive multiple of {block}; got {split_tokens}")
    group = num_heads // num_kv_heads
    options = dict(
        SCALE=scale,
        WINDOW=sliding_window,
        SOFT_CAP=soft_cap,
        GROUP=group,
        ROWS=max(16, 1 << (group - 1).bit_length()),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        LAYER_STRIDE=num_pages * page_size * num_kv_heads * head_dim,
        MAX_PAGES=page_table.shape[1],
        BLOCK=block,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    most_tokens = page_table.shape[1] * page_size
    pieces = _most_pieces(
        num_rows * num_kv_heads, most_tokens, sliding_window, split_tokens, tuning
    )
    inputs = (q, k_pages, v_pages, layer, page_table, seq_lens)
    return _launch(inputs, pieces, split_tokens, tuning, options)


def _most_pieces(
    num_contexts: int,
    most_tokens: int,
    window: int | None,
    split_tokens: int | None,
    tuning: TritonDecodeTuning,
) -> int:
    """Pieces that a row can have; without `split_tokens`, no more than fill the GPU."""
    smallest = split_tokens or tuning.min_split_tokens
    pieces = -(-most_tokens // smallest)
    if window is not None:
        pieces = min(pieces, -(-window // smallest) + 1)
    if split_tokens is None:
        pieces = min(pieces, -(-tuning.num_programs // num_contexts))
    return max(1, pieces)


def _launch(inputs, pieces: int, split_tokens: int | None, tuning, options) -> jax.Array:
    """One kernel for one piece a row, else two, which meet in float32 arrays."""
    import_jax_triton()
    from pallas_kernels.triton_gpu import triton_decode_kernels as kernels

    q, seq_lens = inputs[0], inputs[-1]
    num_rows, num_heads, head_dim = q.shape
    grid = (options["NUM_KV_HEADS"], pieces, num_rows)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if pieces == 1:
        return launch(*inputs, kernel=kernels.decode_kernel, out=out, grid=grid, **options)
    block = options["BLOCK"]
    cut = dict(
        MIN_BLOCKS=max(1, tuning.min_split_tokens // block),
        SPLIT_BLOCKS=None if split_tokens is None else split_tokens // block,
    )
    sums, weights = launch(
        *inputs,
        kernel=kernels.decode_piece_kernel,
        out=(
            jax.ShapeDtypeStruct((num_rows, num_heads, pieces, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_heads, pieces), jnp.float32),
        ),
        grid=grid,
        **options,
        **cut,
    )
    return launch(
        seq_lens,
        sums,
        weights,
        pieces,
        kernel=kernels.combine_kernel,
        out=out,
        grid=(num_heads, num_rows),
        WINDOW=options["WINDOW"],
        HEAD_DIM=head_dim,
        BLOCK=block,
        **cut,
    )
