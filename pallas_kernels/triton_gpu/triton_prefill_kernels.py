"""The Triton kernel of prefill attention: one tile of queries of one head, or tokens of no tile."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.triton_gpu.triton_blocks import LOWEST, attend_blocks


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    layer_ptr,
    table_ptr,
    tiles_ptr,
    counts_ptr,
    decoded_ptr,
    max_tiles,
    num_tokens,
    num_decoded,
    out_ptr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend one tile, or fill other tokens; grid (N, max_tiles + T / TILE, rounded up).

    Args:
      q_ptr: [T, N, H].
      k_ptr: [L, P, B, K, H].
      v_ptr: as k_ptr.
      layer_ptr: [1] int32.
      table_ptr: [S, M] int32.
      tiles_ptr: [max_tiles, 5] int32, as in `PrefillTiles`, with alignment 1.
      counts_ptr: [3] int32, likewise.
      decoded_ptr: [num_decoded, N, H].
      max_tiles: with or without work.
      num_tokens: T.
      num_decoded: D.
      out_ptr: [T, N, H].
      SCALE: multiplies the logits.
      WINDOW: keys that a query sees, or None.
      SOFT_CAP: bound of the logits, or None.
      GROUP: query heads a KV head.
      NUM_HEADS: N.
      HEAD_DIM: H.
      PAGE_SIZE: B.
      LAYER_STRIDE: elements of a layer's pages.
      MAX_PAGES: M.
      TILE: tokens a tile.
      BLOCK: keys a block.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, TILE)
    column = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    token_stride = NUM_HEADS * HEAD_DIM
    if index >= max_tiles:
        first_token = tl.load(counts_ptr + 1)
        end_token = tl.load(counts_ptr + 2)
        token = (index - max_tiles) * TILE + place
        offset = token.to(tl.int64)[:, None] * token_stride + column[None, :]
        is_decoded = token < tl.minimum(first_token, num_decoded)
        rest = tl.load(decoded_ptr + offset, mask=is_decoded[:, None], other=0.0)
        is_other = (token < first_token) | ((token >= end_token) & (token < num_tokens))
        tl.store(out_ptr + offset, rest, mask=is_other[:, None])
    elif index < tl.load(counts_ptr):
        tile = tiles_ptr + index * 5
        row = tl.load(tile).to(tl.int64)
        first_token = tl.load(tile + 1)
        end_token = tl.load(tile + 3)
        base = tl.load(tile + 4)
        token = first_token + place
        offset = token.to(tl.int64)[:, None] * token_stride + column[None, :]
        start = tl.load(layer_ptr).to(tl.int64) * LAYER_STRIDE + head // GROUP * HEAD_DIM
        out = attend_tile(
            tl.load(q_ptr + offset, mask=token[:, None] < end_token, other=0.0),
            k_ptr + start, v_ptr + start, table_ptr + row * MAX_PAGES,
            base, end_token - first_token,
            SCALE, WINDOW, SOFT_CAP, PAGE_SIZE, NUM_HEADS // GROUP * HEAD_DIM, HEAD_DIM, TILE,
            BLOCK,
        )  # fmt: skip
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset, out, mask=token[:, None] < end_token)


@triton.jit
def attend_tile(
    q,
    k_head,
    v_head,
    table_row,
    base,
    count,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend `count` queries, the first at position `base`: float32[TILE, H].

    Masks are only made in the blocks that some query sees in part.
    """
    position = base + tl.arange(0, TILE)
    end_key = base + count
    end_block = tl.cdiv(end_key, BLOCK)
    first_key = base * 0
    if WINDOW is not None:
        first_key = tl.maximum(base - WINDOW + 1, 0)
    first_block = first_key // BLOCK
    inner = first_block
    acc = tl.zeros([TILE, HEAD_DIM], tl.float32)
    highest = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if WINDOW is not None:
        inner = tl.cdiv(tl.maximum(end_key - WINDOW, 0), BLOCK)
        inner = tl.minimum(tl.maximum(inner, first_block), end_block)
        acc, highest, total = attend_blocks(
            q, acc, highest, total, k_head, v_head, table_row, position, first_block, inner,
            first_key, end_key, SCALE, WINDOW, SOFT_CAP, PAGE_SIZE, TOKEN_STRIDE, HEAD_DIM, BLOCK,
            True,
        )  # fmt: skip
    outer = tl.maximum((base + 1) // BLOCK, inner)
    acc, highest, total = attend_blocks(
        q, acc, highest, total, k_head, v_head, table_row, position, inner, outer,
        first_key, end_key, SCALE, WINDOW, SOFT_CAP, PAGE_SIZE, TOKEN_STRIDE, HEAD_DIM, BLOCK,
        False,
    )  # fmt: skip
    acc, highest, total = attend_blocks(
        q, acc, highest, total, k_head, v_head, table_row, position, outer, end_block,
        first_key, end_key, SCALE, WINDOW, SOFT_CAP, PAGE_SIZE, TOKEN_STRIDE, HEAD_DIM, BLOCK,
        True,
    )  # fmt: skip
    return acc / tl.maximum(total, 1e-30)[:, None]
