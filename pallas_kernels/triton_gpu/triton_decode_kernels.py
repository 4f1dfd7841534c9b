"""The Triton kernels of decode attention: a piece of a row's context, and the sum of all pieces."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.triton_gpu.triton_blocks import LOWEST, MASKED, attend_blocks

PIECES_TOGETHER = tl.constexpr(16)  # pieces whose sums are read at the same time


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    layer_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend one row's whole context with the queries of one KV head; grid (K, 1, S).

    Args:
      q_ptr: [S, N, H].
      k_ptr: [L, P, B, K, H].
      v_ptr: as k_ptr.
      layer_ptr: [1] int32.
      table_ptr: [S, M] int32.
      lens_ptr: [S] int32.
      out_ptr: [S, N, H].
      SCALE: multiplies the logits.
      WINDOW: keys that a query sees, or None.
      SOFT_CAP: bound of the logits, or None.
      GROUP: query heads a KV head.
      ROWS: rows of a tile of queries, a power of two.
      NUM_KV_HEADS: K.
      HEAD_DIM: H.
      PAGE_SIZE: B.
      LAYER_STRIDE: elements of a layer's pages.
      MAX_PAGES: M.
      BLOCK: keys a block.
    """
    head, row = tl.program_id(0), tl.program_id(2)
    length = tl.load(lens_ptr + row)
    first_key, first, end, _ = piece_of_row(length, 0, 1, 1, WINDOW, None, BLOCK)
    acc, highest, total = attend_piece(
        q_ptr, k_ptr, v_ptr, layer_ptr, table_ptr, row, head, length, first_key, first, end,
        SCALE, WINDOW, SOFT_CAP, GROUP, ROWS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYER_STRIDE,
        MAX_PAGES, BLOCK,
    )  # fmt: skip
    query = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    index = (row.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + query
    out = acc / tl.maximum(total, 1e-30)[:, None]
    target = out_ptr + index[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=query[:, None] < GROUP)


@triton.jit
def decode_piece_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    layer_ptr,
    table_ptr,
    lens_ptr,
    sums_ptr,
    weight_ptr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
):
    """Attend one piece of one row's context; grid (K, pieces, S).

    The arguments are those of `decode_kernel`, but it writes the piece's output to sums_ptr,
    float32[S, N, pieces, H], and the binary logarithm of its sum of weights to weight_ptr,
    float32[S, N, pieces]; of an empty piece, nothing. A piece has at least MIN_BLOCKS blocks, or
    ends at a multiple of SPLIT_BLOCKS, if that is not None.
    """
    head, piece, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces = tl.num_programs(1)
    length = tl.load(lens_ptr + row)
    first_key, first, end, _ = piece_of_row(
        length, piece, pieces, MIN_BLOCKS, WINDOW, SPLIT_BLOCKS, BLOCK
    )
    if first < end:
        acc, highest, total = attend_piece(
            q_ptr, k_ptr, v_ptr, layer_ptr, table_ptr, row, head, length, first_key, first, end,
            SCALE, WINDOW, SOFT_CAP, GROUP, ROWS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE,
            LAYER_STRIDE, MAX_PAGES, BLOCK,
        )  # fmt: skip
        query = tl.arange(0, ROWS)
        dim = tl.arange(0, HEAD_DIM)
        place = ((row.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + query) * pieces + piece
        target = sums_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        tl.store(target, acc / total[:, None], mask=query[:, None] < GROUP)
        tl.store(weight_ptr + place, highest + tl.log2(total), mask=query < GROUP)


@triton.jit
def combine_kernel(
    lens_ptr,
    sums_ptr,
    weight_ptr,
    pieces,
    out_ptr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
):
    """Add up the pieces of one query head in their order; grid (N, S).

    Args:
      lens_ptr: [S] int32.
      sums_ptr: as in `decode_piece_kernel`.
      weight_ptr: likewise.
      pieces: most pieces of a row.
      out_ptr: [S, N, H].
      WINDOW: as in `decode_piece_kernel`, like the rest.
      HEAD_DIM: H.
      BLOCK: keys a block.
      MIN_BLOCKS: in a piece.
      SPLIT_BLOCKS: of a piece, or None.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens_ptr + row)
    _, _, _, used = piece_of_row(length, 0, pieces, MIN_BLOCKS, WINDOW, SPLIT_BLOCKS, BLOCK)
    index = row.to(tl.int64) * tl.num_programs(0) + head
    offset = tl.arange(0, PIECES_TOGETHER)
    dim = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    highest = LOWEST
    total = 0.0
    for begin in range(0, used, PIECES_TOGETHER):
        piece = begin + offset
        place = index * pieces + piece
        weight = tl.load(weight_ptr + place, mask=piece < used, other=MASKED)
        source = sums_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        sums = tl.load(source, mask=piece[:, None] < used, other=0.0)
        new_highest = tl.maximum(highest, tl.max(weight, 0))
        share = tl.exp2(weight - new_highest)
        shrink = tl.exp2(highest - new_highest)
        acc = acc * shrink + tl.sum(sums * share[:, None], 0)
        total = total * shrink + tl.sum(share, 0)
        highest = new_highest
    out = acc / tl.maximum(total, 1e-30)
    tl.store(out_ptr + index * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty))


@triton.jit
def piece_of_row(
    length,
    piece,
    pieces,
    MIN_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First visible key, the piece's first block and end, and how many pieces the row has."""
    first_key = length * 0
    if WINDOW is not None:
        first_key = tl.maximum(length - WINDOW, 0)
    first = first_key // BLOCK
    end = tl.cdiv(length, BLOCK)
    if SPLIT_BLOCKS is None:
        blocks = tl.maximum(tl.cdiv(end - first, pieces), MIN_BLOCKS)
        used = tl.cdiv(end - first, blocks)
        begin = first + piece * blocks
        stop = tl.minimum(begin + blocks, end)
    else:
        skipped = first // SPLIT_BLOCKS
        used = tl.cdiv(end, SPLIT_BLOCKS) - skipped
        begin = tl.maximum((skipped + piece) * SPLIT_BLOCKS, first)
        stop = tl.minimum((skipped + piece + 1) * SPLIT_BLOCKS, end)
    return first_key, begin, stop, used


@triton.jit
def attend_piece(
    q_ptr,
    k_ptr,
    v_ptr,
    layer_ptr,
    table_ptr,
    row,
    head,
    length,
    first_key,
    begin,
    end,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of the blocks `[begin, end)` of one row and KV head, as `attend_blocks` gives."""
    query = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    index = (row.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + query
    source = q_ptr + index[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(source, mask=query[:, None] < GROUP, other=0.0)
    start = tl.load(layer_ptr).to(tl.int64) * LAYER_STRIDE + head * HEAD_DIM
    return attend_blocks(
        q,
        tl.zeros([ROWS, HEAD_DIM], tl.float32),
        tl.full([ROWS], LOWEST, tl.float32),
        tl.zeros([ROWS], tl.float32),
        k_ptr + start,
        v_ptr + start,
        table_ptr + row.to(tl.int64) * MAX_PAGES,
        query * 0 + (length - 1),
        begin,
        end,
        first_key,
        length,
        SCALE,
        None,  # no key before first_key is seen
        SOFT_CAP,
        PAGE_SIZE,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        BLOCK,
        True,
    )
