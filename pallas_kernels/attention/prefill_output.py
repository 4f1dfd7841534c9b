"""How the prefill kernel writes its output: tiles of queries, and the tokens that have none."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_attention import TILE_ROWS
from pallas_kernels.attention.prefill_work import Refs


def write_tile(
    tile: jax.Array,
    staged: tuple[Any, Any],
    out_ref: Any,
    first_token: jax.Array,
    first: jax.Array,
    count: jax.Array,
) -> None:
    """Write the rows `[first, first + count)` of a tile, and no others.

    It does not wait for the end of the write.

    Args:
      tile: [64, H].
      staged: two views [64, H] of the same shared memory, swizzled and plain.
      out_ref: [T, H] in global memory, the output of one head.
      first_token: of row 0.
      first: row, int32.
      count: rows, int32, at least 1.
    """
    swizzled, plain = staged
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left the memory

    def write_whole():
        swizzled[...] = tile
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(swizzled, out_ref.at[pl.ds(first_token, TILE_ROWS)])

    def write_rows():
        plain[...] = tile
        plgpu.commit_smem()
        eights = lax.div(count, jnp.int32(8))

        def copy(place, size):
            target = out_ref.at[pl.ds(first_token + place, size)]
            plgpu.copy_smem_to_gmem(plain.at[pl.ds(place, size)], target)

        pl.loop(0, eights)(lambda index: copy(first + index * 8, 8))
        pl.loop(0, count - eights * 8)(lambda index: copy(first + eights * 8 + index, 1))

    if out_ref.shape[0] % 8:  # the swizzled view is written in tiles of 8 tokens
        write_rows()
    else:
        pl.when(count == TILE_ROWS)(write_whole)
        pl.when(count < TILE_ROWS)(write_rows)


def write_other_tokens(refs: Refs, staged: Any, copied: Any, warpgroups: int) -> None:
    """Write this warpgroup's share of the tokens without a query tile.

    Args:
      refs: arrays in global memory. The tokens before `counts[1]` are copied from decoded, those
        from `counts[2]` on become zero.
      staged: [64, H] plain shared memory of this warpgroup.
      copied: this warpgroup's barrier.
      warpgroups: that share the tokens, in each program.
    """
    num_tokens, num_heads, head_dim = refs.out.shape
    first, end = refs.counts[1], refs.counts[2]
    worker = lax.axis_index("program") * warpgroups + lax.axis_index("wg")
    workers = lax.axis_size("program") * warpgroups
    heads = max(n for n in range(1, TILE_ROWS + 1) if num_heads % n == 0)

    def for_each_part(start, stop, do):
        """Call `do(token, heads)` for this worker's tokens in `[start, stop)`."""
        mine = lax.div(jnp.maximum(stop - start - worker, 0) + (workers - 1), jnp.int32(workers))

        @pl.loop(0, mine)
        def _token(index):
            token = start + worker + index * workers
            pl.loop(0, num_heads // heads)(lambda part: do(token, pl.ds(part * heads, heads)))

    part = staged.at[pl.ds(0, heads)]

    def copy_part(token, heads):
        plgpu.copy_gmem_to_smem(refs.decoded.at[token, heads], part, copied)
        plgpu.barrier_wait(copied)
        plgpu.copy_smem_to_gmem(part, refs.out.at[token, heads])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write_zeros(token, heads):
        plgpu.copy_smem_to_gmem(part, refs.out.at[token, heads])

    zeros_from = jnp.int32(0)
    if refs.decoded is not None:
        for_each_part(jnp.int32(0), jnp.minimum(first, refs.decoded.shape[0]), copy_part)
        zeros_from = first

    @pl.when((zeros_from < first) | (end < num_tokens))
    def _zeros():
        zeros = jnp.full((TILE_ROWS, head_dim), 0, staged.dtype)
        staged[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        for_each_part(zeros_from, first, write_zeros)
        for_each_part(end, jnp.int32(num_tokens), write_zeros)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
