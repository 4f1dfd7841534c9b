"""DecodePlan: how one step's contexts are cut and shared out, computed once for all layers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention.tuning import DecodeTuningConfig, decode_tuning
from pallas_kernels.platform import gpu_kind

SHARE_FIELDS = 9
NEVER = jnp.iinfo(jnp.int32).max
MAX_FUSED_SUM = 31
"""So many numbers XLA sums up within the kernel that reads the sum: fewer than a warp's threads."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Segments of the contexts, and which thread block attends which of them.

    A segment is a range of blocks of one row; a row has one or, where it is cut, several. Every
    KV head has the same segments, and each share of them goes to one thread block a head.

    Attributes:
      segments: [R, 7] int32: row, tokens in cache, first block, number of blocks, number of the
        piece within its row, pieces of the row, place of the row's first piece in the workspace.
      shares: [A, 9] int32: first segment and end of each share, then its first segment's fields.
      counters: [S, K] int32, pieces of a row that are done. All 0: the kernel counts in it and
        leaves it as it was.
      block_tokens: keys a block.
      sliding_window: for which the plan was made; None = the whole context.
      split_tokens: likewise; None = cut evenly.
      max_pieces: places in the workspace.
    """

    segments: jax.Array
    shares: jax.Array
    counters: jax.Array
    block_tokens: int = field(metadata={"static": True})
    sliding_window: int | None = field(metadata={"static": True})
    split_tokens: int | None = field(metadata={"static": True})
    max_pieces: int = field(metadata={"static": True})


class _Rows(NamedTuple):
    """By row, [S] int32: visible blocks, first of them, and place among all rows' blocks.

    A row without keys takes the place of one block, so that such rows are shared out, too.
    """

    length: jax.Array
    first: jax.Array
    blocks: jax.Array
    start: jax.Array
    end: jax.Array


class _Cuts(NamedTuple):
    """What both ways to cut give.

    Attributes:
      pieces: [S], how many segments each row becomes.
      begin: (row, piece) -> place among all rows' blocks where that piece begins.
      shares: [A - 1], places where the second and later shares begin.
    """

    pieces: jax.Array
    begin: Callable[[jax.Array, jax.Array], jax.Array]
    shares: jax.Array


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_kv_heads",
        "head_dim",
        "dtype",
        "max_tokens",
        "sliding_window",
        "split_tokens",
        "tuning",
    ),
)
def plan_decode(
    seq_lens: jax.Array,
    *,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    max_tokens: int,
    sliding_window: int | None = None,
    split_tokens: int | None = None,
    tuning: DecodeTuningConfig | None = None,
) -> DecodePlan:
    """Cut the contexts and share the segments out evenly over the GPU.

    Args:
      seq_lens: [S] int32, tokens in cache, this step's included; 0 = padding row.
      num_kv_heads: K, of one device.
      head_dim: H, as stored.
      dtype: of queries and pages.
      max_tokens: that a page table can hold.
      sliding_window: the query sees this many keys; None = all.
      split_tokens: the context is cut at multiples of it, whatever the batch; None = cut only so
        that the GPU is filled evenly.
      tuning: sizes of the kernel; None = from the table.

    Raises:
      ValueError: `split_tokens` is no positive multiple of a block.

    Source: Dao et al. 2023 (Flash-Decoding, splits of the context); Osama et al. 2023 (Stream-K,
    even shares that cut tiles); Sanovar et al. 2024 (Lean attention, the same for decoding).
    """
    tuning = tuning or decode_tuning(gpu_kind(), head_dim, dtype)
    block = tuning.block_tokens
    if split_tokens is not None and (split_tokens < 1 or split_tokens % block):
        raise ValueError(f"split_tokens must be a positive multiple of {block}; got {split_tokens}")
    num_rows = seq_lens.shape[0]
    smallest = split_tokens or tuning.min_split_tokens
    most = num_rows * max(1, -(-max_tokens // smallest))
    num_programs = tuning.num_processors * tuning.programs_per_processor
    num_shares = max(1, min(num_programs // num_kv_heads, most))
    rows = _measure_rows(seq_lens, block, sliding_window)
    if split_tokens is None:
        cuts = _cut_evenly(rows, num_shares, max(1, smallest // block))
        num_segments = num_rows + num_shares - 1
        max_pieces = max(1, 2 * (num_shares - 1))
    else:
        cuts = _cut_at_multiples(rows, num_shares, split_tokens // block)
        num_segments = num_rows * _most_splits(max_tokens, split_tokens, sliding_window)
        max_pieces = num_segments
    segments, begins = _list_segments(rows, cuts, num_segments)
    return DecodePlan(
        segments=segments,
        shares=_list_shares(segments, begins, cuts.shares),
        counters=zero_counters(seq_lens, num_kv_heads),
        block_tokens=block,
        sliding_window=sliding_window,
        split_tokens=split_tokens,
        max_pieces=max_pieces,
    )


def zero_counters(seq_lens: jax.Array, num_kv_heads: int) -> jax.Array:
    """Zeros [S, K] that XLA cannot take for a constant, since a kernel counts in their memory.

    It leaves them as they were, so all layers of a step count in the same.
    """
    return jnp.broadcast_to(jnp.minimum(seq_lens, 0)[:, None], (seq_lens.size, num_kv_heads))


def _measure_rows(seq_lens: jax.Array, block: int, window: int | None) -> _Rows:
    start = jnp.zeros_like(seq_lens) if window is None else jnp.maximum(seq_lens - window, 0)
    first = start // block
    blocks = (seq_lens + (block - 1)) // block - first
    place = jnp.maximum(blocks, 1)
    end = _running_sum(place)
    return _Rows(seq_lens, first, blocks, end - place, end)


def _cut_evenly(rows: _Rows, num_shares: int, smallest: int) -> _Cuts:
    """Equal shares, cut wherever they end; short contexts in pieces of about `smallest` blocks."""
    longest = jnp.maximum(rows.blocks.max(), 1)
    pieces = jnp.maximum((longest + smallest // 2) // smallest, 1)
    share = jnp.maximum(-(-rows.end[-1] // num_shares), -(-longest // pieces))
    cuts = jnp.arange(1, num_shares, dtype=jnp.int32) * share
    # A piece of less than 1/32 of a share is not worth its combination.
    row = _first_beyond(rows.end, cuts)
    start, end = rows.start[row], rows.end[row]
    cuts = jnp.where(cuts - start < share // 32, start, cuts)
    cuts = jnp.where((end - cuts < share // 32) & (cuts > start), end, cuts)
    before = _count(cuts, jnp.less_equal, rows.start)
    inside = _count(cuts, jnp.less, rows.end) - before
    return _Cuts(1 + inside, functools.partial(_begin_at_cut, rows, cuts, before), cuts)


def _begin_at_cut(rows: _Rows, cuts: jax.Array, before: jax.Array, row, piece) -> jax.Array:
    if not cuts.size:
        return rows.start[row]
    cut = cuts[jnp.clip(before[row] + piece - 1, 0, cuts.size - 1)]
    return jnp.where(piece == 0, rows.start[row], cut)


def _cut_at_multiples(rows: _Rows, num_shares: int, split: int) -> _Cuts:
    """Each row at multiples of `split` blocks; whole segments are shared out."""
    pieces = jnp.maximum(-(-(rows.first + rows.blocks) // split) - rows.first // split, 1)
    share = -(-rows.end[-1] // num_shares)
    cuts = jnp.arange(1, num_shares, dtype=jnp.int32) * share
    return _Cuts(pieces, functools.partial(_begin_at_multiple, rows, split), cuts)


def _begin_at_multiple(rows: _Rows, split: int, row, piece) -> jax.Array:
    skipped = jnp.maximum((rows.first[row] // split + piece) * split - rows.first[row], 0)
    return rows.start[row] + skipped


def _most_splits(max_tokens: int, split_tokens: int, window: int | None) -> int:
    splits = max(1, -(-max_tokens // split_tokens))
    return splits if window is None else min(splits, -(-window // split_tokens) + 1)


def _list_segments(rows: _Rows, cuts: _Cuts, num_segments: int) -> tuple[jax.Array, jax.Array]:
    """Segments [R, 7], and [R] where they begin among all rows' blocks; places left over: never."""
    index = jnp.arange(num_segments, dtype=jnp.int32)
    ends = _running_sum(cuts.pieces)
    row = _first_beyond(ends, index)
    pieces = cuts.pieces[row]
    piece = jnp.minimum(index - (ends[row] - pieces), pieces - 1)
    begin = cuts.begin(row, piece)
    end = jnp.where(piece + 1 == pieces, rows.end[row], cuts.begin(row, piece + 1))
    steps = jnp.where(rows.blocks[row] > 0, end - begin, 0)
    first = rows.first[row] + begin - rows.start[row]
    stored = jnp.where(cuts.pieces > 1, cuts.pieces, 0)
    place = (_running_sum(stored) - stored)[row]
    fields = (row, rows.length[row], first, steps, piece, pieces, place)
    begin = jnp.where(index < ends[-1], begin, NEVER)
    return jnp.stack(fields, axis=1).astype(jnp.int32), begin


def _list_shares(segments: jax.Array, begins: jax.Array, cuts: jax.Array) -> jax.Array:
    """Shares [A, 9]: a segment belongs to the share in which it begins."""
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), cuts, jnp.full(1, NEVER, jnp.int32)])
    bounds = _count(begins, jnp.less, bounds)
    first, end = bounds[:-1], bounds[1:]
    fields = segments[jnp.minimum(first, segments.shape[0] - 1)]
    return jnp.concatenate([first[:, None], end[:, None], fields], axis=1)


def _running_sum(numbers: jax.Array) -> jax.Array:
    """Inclusive; jnp.cumsum is several kernels."""
    index = jnp.arange(numbers.size)
    before, here, axis = _all_pairs(index, index)
    added, _, _ = _all_pairs(numbers, index)
    return jnp.where(before <= here, added, 0).sum(axis, dtype=jnp.int32)


def _first_beyond(ends: jax.Array, places: jax.Array) -> jax.Array:
    """Index of the first of the increasing `ends` that lies beyond each place, or the last."""
    return jnp.minimum(_count(ends, jnp.less_equal, places), ends.size - 1)


def _count(
    numbers: jax.Array, compare: Callable[[jax.Array, jax.Array], jax.Array], places: jax.Array
) -> jax.Array:
    """How many of the numbers compare so with each of the places."""
    numbers, places, axis = _all_pairs(numbers, places)
    return compare(numbers, places).sum(axis, dtype=jnp.int32)


def _all_pairs(summed: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array, int]:
    """Views that broadcast to all pairs, and the axis to sum over.

    XLA for GPUs takes a short sum over the first axis into the kernel that reads it. A sum over
    the last axis becomes a kernel of its own, in which threads share the work.
    """
    if summed.size <= MAX_FUSED_SUM:
        return summed[:, None], kept[None], 0
    return summed[None], kept[:, None], 1
