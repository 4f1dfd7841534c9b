"""DecodePlan: how one step's contexts are cut and shared out, computed once for all layers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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
      leaves_padding: likewise.
      max_pieces: places in the workspace.
    """

    segments: jax.Array
    shares: jax.Array
    counters: jax.Array
    block_tokens: int = field(metadata={"static": True})
    sliding_window: int | None = field(metadata={"static": True})
    split_tokens: int | None = field(metadata={"static": True})
    leaves_padding: bool = field(metadata={"static": True})
    max_pieces: int = field(metadata={"static": True})


class _Rows(NamedTuple):
    """By row, [S] int32: visible blocks, first of them, and place among all rows' blocks.

    A row without keys takes the place of one block, so that such rows are shared out, too; or, if
    nobody reads its result, of none. `longest`, int32: most visible blocks of a row. `wanted`,
    int32: how many rows, the first ones, have segments; None = all.
    """

    length: jax.Array
    first: jax.Array
    blocks: jax.Array
    start: jax.Array
    end: jax.Array
    longest: jax.Array
    wanted: jax.Array | None


class _Cuts(NamedTuple):
    """Where equal shares end, [A] int32 each.

    A share that ends between two rows cuts none: place and segment are NEVER, and nobody reads
    piece and cuts.

    Attributes:
      segments: how many begin before.
      place: of the cut among all rows' blocks.
      segment: that begins with the cut.
      piece: of its row, that begins with the cut.
      cuts: that its row has.
    """

    segments: jax.Array
    place: jax.Array
    segment: jax.Array
    piece: jax.Array
    cuts: jax.Array


class _Segments(NamedTuple):
    """By segment, [R] int32; segments left over repeat the last.

    Row, number of the piece within it, pieces of the row, place of the row's first piece in the
    workspace; begin and end among all rows' blocks.
    """

    row: jax.Array
    piece: jax.Array
    pieces: jax.Array
    stored: jax.Array
    begin: jax.Array
    end: jax.Array


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_kv_heads",
        "head_dim",
        "dtype",
        "max_tokens",
        "sliding_window",
        "split_tokens",
        "leaves_padding",
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
    leaves_padding: bool = False,
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
      leaves_padding: rows without tokens stand last and get no segment: nobody is to read what the
        attention returns for them.
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
    rows = _measure_rows(seq_lens, block, sliding_window, leaves_padding)
    if split_tokens is None:
        cuts = _cut_evenly(rows, num_shares, max(1, smallest // block))
        made, ends = _segments_between(rows, cuts, num_rows + num_shares - 1), cuts.segments
        max_pieces = max(1, 2 * (num_shares - 1))
    else:
        max_pieces = num_rows * _most_splits(max_tokens, split_tokens, sliding_window)
        made, ends = _cut_at_multiples(rows, num_shares, split_tokens // block, max_pieces)
    segments = _list_segments(rows, made)
    return DecodePlan(
        segments=segments,
        shares=_list_shares(segments, ends),
        counters=zero_counters(seq_lens, num_kv_heads),
        block_tokens=block,
        sliding_window=sliding_window,
        split_tokens=split_tokens,
        leaves_padding=leaves_padding,
        max_pieces=max_pieces,
    )


def zero_counters(seq_lens: jax.Array, num_kv_heads: int) -> jax.Array:
    """Zeros [S, K] that XLA cannot take for a constant, since a kernel counts in their memory.

    It leaves them as they were, so all layers of a step count in the same.
    """
    return jnp.broadcast_to(jnp.minimum(seq_lens, 0)[:, None], (seq_lens.size, num_kv_heads))


def _measure_rows(
    seq_lens: jax.Array, block: int, window: int | None, leaves_padding: bool
) -> _Rows:
    start = jnp.zeros_like(seq_lens) if window is None else jnp.maximum(seq_lens - window, 0)
    first = lax.div(start, block)
    blocks = _ceil_div(seq_lens, block) - first
    place = blocks if leaves_padding else jnp.maximum(blocks, 1)
    # The maximum of all rows is found in the kernel of the sums, as the last running maximum.
    end, longest = lax.optimization_barrier((_running_sum(place), _running_max(blocks)))
    wanted = (blocks > 0).sum(dtype=jnp.int32) if leaves_padding else None
    return _Rows(seq_lens, first, blocks, end - place, end, longest[-1], wanted)


def _cut_evenly(rows: _Rows, num_shares: int, smallest: int) -> _Cuts:
    """Equal shares, cut wherever they end; short contexts in pieces of about `smallest` blocks."""
    longest = jnp.maximum(rows.longest, 1)
    pieces = jnp.maximum(lax.div(longest + smallest // 2, smallest), 1)
    share = jnp.maximum(_ceil_div(rows.end[-1], num_shares), _ceil_div(longest, pieces))
    place = _ends_of_shares(share, num_shares)
    # A piece of less than 1/32 of a share is not worth its combination.
    least = jnp.full_like(place, lax.div(share, 32))
    return _place_cuts(rows, *lax.optimization_barrier((place, least)))


def _place_cuts(rows: _Rows, place: jax.Array, least: jax.Array) -> _Cuts:
    """Cuts at or near the places [A]: none makes a piece of fewer blocks than `least` [A]."""
    row = _first_beyond(rows.end, place)
    start, end = rows.start[row], rows.end[row]
    place = jnp.where(place - start < least, start, place)
    place = jnp.where((end - place < least) & (place > start), end, place)
    is_within = (start < place) & (place < end)
    cut_row, cut_place = (jnp.where(is_within, field, NEVER) for field in (row, place))
    begun = row + (place > start)
    if rows.wanted is not None:
        begun = jnp.minimum(begun, rows.wanted)
    segments = begun + _count(cut_place, jnp.less, place)
    other_place, own_place, axis = _all_pairs(cut_place, place)
    other_row, own_row, _ = _all_pairs(cut_row, row)
    is_own = other_row == own_row
    cuts = _Cuts(
        segments=segments,
        place=cut_place,
        segment=jnp.where(is_within, segments, NEVER),
        piece=(is_own & (other_place <= own_place)).sum(axis, dtype=jnp.int32),
        cuts=is_own.sum(axis, dtype=jnp.int32),
    )
    return lax.optimization_barrier(cuts)


def _ends_of_shares(share: jax.Array, num_shares: int) -> jax.Array:
    """[A], places where the shares end; the last takes whatever is left."""
    number = jnp.arange(1, num_shares + 1, dtype=jnp.int32)
    return jnp.where(number < num_shares, number * share, NEVER)


def _segments_between(rows: _Rows, cuts: _Cuts, num_segments: int) -> _Segments:
    """A segment begins with its row or with a cut, so all about it is told by the cuts before."""
    index = jnp.minimum(jnp.arange(num_segments, dtype=jnp.int32), cuts.segments[-1] - 1)
    segment, here, axis = _all_pairs(cuts.segment, index)
    place, cut_piece, cuts_of_row = (
        _all_pairs(numbers, index)[0] for numbers in (cuts.place, cuts.piece, cuts.cuts)
    )
    is_before, is_here = segment <= here, segment == here
    row = index - is_before.sum(axis, dtype=jnp.int32)
    piece = jnp.where(is_here, cut_piece, 0).max(axis)
    # The first cut of a row adds two pieces to the workspace, others one.
    stored = jnp.where(is_before, 1 + (cut_piece == 1), 0).sum(axis, dtype=jnp.int32)
    return _Segments(
        row=row,
        piece=piece,
        pieces=1 + jnp.where(is_here | (segment == here + 1), cuts_of_row, 0).max(axis),
        stored=stored - jnp.where(piece > 0, piece + 1, 0),
        begin=jnp.maximum(rows.start[row], jnp.where(is_before, place, 0).max(axis)),
        end=jnp.minimum(rows.end[row], jnp.where(is_before, NEVER, place).min(axis)),
    )


def _cut_at_multiples(
    rows: _Rows, num_shares: int, split: int, num_segments: int
) -> tuple[_Segments, jax.Array]:
    """Each row at multiples of `split` blocks; whole segments are shared out.

    Returns:
      The segments, and [A] how many of them begin before the end of each share.
    """
    skipped = lax.div(rows.first, split)
    pieces = jnp.maximum(_ceil_div(rows.first + rows.blocks, split) - skipped, 1)
    stored = jnp.where(pieces > 1, pieces, 0)
    ends, stored_ends = _running_sum(pieces), _running_sum(stored)
    index = jnp.arange(num_segments, dtype=jnp.int32)
    row = _first_beyond(ends, index)
    piece = jnp.minimum(index - (ends - pieces)[row], pieces[row] - 1)
    begin = _begin_at_multiple(rows, split, row, piece)
    following = _begin_at_multiple(rows, split, row, piece + 1)
    made = _Segments(
        row=row,
        piece=piece,
        pieces=pieces[row],
        stored=(stored_ends - stored)[row],
        begin=begin,
        end=jnp.where(piece + 1 == pieces[row], rows.end[row], following),
    )
    share_ends = _ends_of_shares(_ceil_div(rows.end[-1], num_shares), num_shares)
    begins = jnp.where(index < ends[-1], begin, NEVER)
    if rows.wanted is not None:
        begins = jnp.where(row < rows.wanted, begins, NEVER)
    return made, _count(begins, jnp.less, share_ends)


def _begin_at_multiple(rows: _Rows, split: int, row: jax.Array, piece: jax.Array) -> jax.Array:
    skipped = (lax.div(rows.first, split)[row] + piece) * split - rows.first[row]
    return rows.start[row] + jnp.maximum(skipped, 0)


def _most_splits(max_tokens: int, split_tokens: int, window: int | None) -> int:
    splits = max(1, -(-max_tokens // split_tokens))
    return splits if window is None else min(splits, -(-window // split_tokens) + 1)


def _list_segments(rows: _Rows, made: _Segments) -> jax.Array:
    """Segments [R, 7].

    Without the barrier, XLA would compute what the fields share anew for each of them.
    """
    row = made.row
    steps = jnp.where(rows.blocks[row] > 0, made.end - made.begin, 0)
    first = rows.first[row] + made.begin - rows.start[row]
    fields = (row, rows.length[row], first, steps, made.piece, made.pieces, made.stored)
    return jnp.stack(lax.optimization_barrier(fields), axis=1)


def _list_shares(segments: jax.Array, end: jax.Array) -> jax.Array:
    """Shares [A, 9]: a segment belongs to the share in which it begins."""
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), end[:-1]])
    fields = segments[jnp.minimum(first, segments.shape[0] - 1)]
    return jnp.concatenate([first[:, None], end[:, None], fields], axis=1)


def _running_max(numbers: jax.Array) -> jax.Array:
    """Of numbers that are not negative."""
    met, axis = _met_so_far(numbers)
    return met.max(axis)


def _running_sum(numbers: jax.Array) -> jax.Array:
    """Inclusive; jnp.cumsum is several kernels."""
    met, axis = _met_so_far(numbers)
    return met.sum(axis, dtype=jnp.int32)


def _met_so_far(numbers: jax.Array) -> tuple[jax.Array, int]:
    """For each place the numbers up to it, else 0, and the axis of the numbers."""
    index = jnp.arange(numbers.size)
    before, here, axis = _all_pairs(index, index)
    met, _, _ = _all_pairs(numbers, index)
    return jnp.where(before <= here, met, 0), axis


def _first_beyond(ends: jax.Array, places: jax.Array) -> jax.Array:
    """Index of the first of the increasing `ends` that lies beyond each place, or the last."""
    return jnp.minimum(_count(ends, jnp.less_equal, places), ends.size - 1)


def _count(
    numbers: jax.Array, compare: Callable[[jax.Array, jax.Array], jax.Array], places: jax.Array
) -> jax.Array:
    """How many of the numbers compare so with each of the places."""
    numbers, places, axis = _all_pairs(numbers, places)
    return compare(numbers, places).sum(axis, dtype=jnp.int32)


def _ceil_div(numbers: jax.Array, by: jax.Array | int) -> jax.Array:
    """Of numbers that are not negative; like lax.div without the branches of `//` for signs."""
    return lax.div(numbers + (by - 1), jnp.asarray(by, jnp.int32))


def _all_pairs(summed: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array, int]:
    """Views that broadcast to all pairs, and the axis to sum over.

    XLA for GPUs takes a short sum over the first axis into the kernel that reads it. A sum over
    the last axis becomes a kernel of its own, in which threads share the work.
    """
    if summed.size <= MAX_FUSED_SUM:
        return summed[:, None], kept[None], 0
    return summed[None], kept[:, None], 1
