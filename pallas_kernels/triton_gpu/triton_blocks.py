"""Online softmax over blocks of paged keys in Triton; decode and prefill attention are made of it.

Only jax-triton's side imports this file: triton is installed with the CUDA extras alone.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

MASKED = tl.constexpr(-1e30)  # a logit that no key has
# Above MASKED: where a row has only masked keys yet, the highest stays at it, so that their
# weights are 0. Finite, so that no difference is NaN.
LOWEST = tl.constexpr(-1e20)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_blocks(
    q,
    acc,
    highest,
    total,
    k_head,
    v_head,
    table_row,
    position,
    begin,
    end,
    first_key,
    end_key,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the blocks `[begin, end)` of keys to the sums of M queries.

    Args:
      q: [M, H] queries.
      acc: [M, H] float32, values weighted with `2 ** (logit - highest)`.
      highest: [M] float32, in powers of two.
      total: [M] float32, sum of the weights.
      k_head: pointer to this layer's keys of one head, of page 0.
      v_head: likewise.
      table_row: pointer to the row's page table.
      position: [M] int32 in the sequence; a query sees the keys up to its own.
      begin: block.
      end: block.
      first_key: the first that any query sees; those before it are not read.
      end_key: end of those that any query sees; those from it on are not read.
      SCALE: multiplies the logits.
      WINDOW: keys that a query sees, or None.
      SOFT_CAP: bound of the logits, or None.
      PAGE_SIZE: B.
      TOKEN_STRIDE: elements between two slots of a page.
      HEAD_DIM: H.
      BLOCK: keys a block.
      IS_MASKED: False where every query sees all keys of all these blocks.
    """
    place = tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_DIM)
    for block in range(begin, end):
        key = block * BLOCK + place
        exists = (key >= first_key) & (key < end_key)
        if IS_MASKED:
            page = tl.load(table_row + key // PAGE_SIZE, mask=exists, other=0)
        else:
            page = tl.load(table_row + key // PAGE_SIZE)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        offset = slot[:, None] * TOKEN_STRIDE + dim[None, :]
        if IS_MASKED:
            keys = tl.load(k_head + offset, mask=exists[:, None], other=0.0)
            values = tl.load(v_head + offset, mask=exists[:, None], other=0.0)
        else:
            keys = tl.load(k_head + offset)
            values = tl.load(v_head + offset)
        logits = tl.dot(q, tl.trans(keys))
        if SOFT_CAP is None:
            logits = logits * (SCALE * LOG2_E)
        else:  # tanh(x) = 1 - 2 / (exp(2 * x) + 1)
            power = tl.exp2(logits * (2 * SCALE / SOFT_CAP * LOG2_E))
            logits = (SOFT_CAP * LOG2_E) * (1 - 2 / (power + 1))
        if IS_MASKED:
            visible = exists[None, :] & (key[None, :] <= position[:, None])
            if WINDOW is not None:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            logits = tl.where(visible, logits, MASKED)
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp2(logits - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        highest = new_highest
    return acc, highest, total
