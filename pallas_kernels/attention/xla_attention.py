"""Paged attention in plain XLA, for CPUs and for GPUs without a Mosaic kernel; memory O(tokens)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.paged_inputs import check_paged_inputs, mask_queries, plan_query_tiles
from pallas_kernels.platform import default_backend

BLOCK_TOKENS = 128  # keys a step of the loop; 100 keys of a small model cost one step
TILE_TOKENS = 64  # queries a tile of prefill
TILES_TOGETHER = 16  # tiles a step on a GPU
MASKED = -1e30  # a logit that no key has; finite, so that MASKED - MASKED is not NaN


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "split_tokens"))
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
) -> jax.Array:
    """Attend each sequence's newest query to its cached pages.

    A row's sums go over the same blocks whoever shares the batch.

    Args:
      q: [S, N, H], one row a sequence, already rotated.
      k_pages: [L, P, B, K, H], all pages of all layers.
      v_pages: as k_pages.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; entries past a sequence's end, and those before its window,
        are not read. Slots past a sequence's end may hold anything, NaN too.
      seq_lens: [S] int32, tokens in cache, this step's included; 0 = padding row.
      scale: multiplies the logits.
      sliding_window: the query sees this many keys, its own included; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      split_tokens: keys a block, a multiple of the page size; None = about 128.

    Returns:
      [S, N, H] in q's dtype; padding rows are zero.

    Raises:
      ValueError: shapes or `split_tokens` do not fit.

    Source: Milakov and Gimelshein 2018 (online softmax).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    num_rows, num_heads, head_dim = q.shape
    _, _, page_size, num_kv_heads, _ = k_pages.shape
    if split_tokens is not None and (split_tokens < 1 or split_tokens % page_size):
        raise ValueError(
            f"split_tokens must be a positive multiple of the page size {page_size}; "
            f"got {split_tokens}"
        )
    first_key = jnp.zeros_like(seq_lens)
    if sliding_window is not None:
        first_key = jnp.maximum(seq_lens - sliding_window, 0)
    spans = _Spans(page_table, seq_lens - 1, first_key, seq_lens)
    options = _Options(scale, sliding_window, soft_cap, split_tokens or BLOCK_TOKENS)
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def attend(queries, spans):
        return _attend(queries, 1, k_pages, v_pages, layer, spans, options)

    if _is_cpu() and num_rows > 1:  # row by row, so that a padding row costs no block
        one_by_one = jax.tree.map(lambda x: x[:, None], (grouped, spans))
        out = lax.map(lambda row: attend(*row), one_by_one)
    else:
        out = attend(grouped, spans)
    return out.reshape(q.shape).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
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
) -> jax.Array:
    """Attend the queries of rows `first_row[0]` and later to their cached pages, causally.

    Row s has the tokens `[query_start_loc[s], query_start_loc[s + 1])`; the last of them stands
    at position `seq_lens[s] - 1`. K and V of this step's tokens are already in the pages.

    Args:
      q: [T, N, H], already rotated.
      k_pages: [L, P, B, K, H], all pages of all layers.
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

    Returns:
      [T, N, H] in q's dtype; zero for the tokens of no row.

    Raises:
      ValueError: the shapes do not fit.
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    together = 1 if _is_cpu() else TILES_TOGETHER
    tiles = plan_query_tiles(
        query_start_loc, first_row, num_tokens=q.shape[0], tile_tokens=TILE_TOKENS
    )
    padding = (0, -tiles.row.shape[0] % together)
    tile_rows = jnp.pad(tiles.row, padding, constant_values=seq_lens.shape[0])
    tile_tokens = jnp.pad(tiles.first_token, padding)
    options = _Options(scale, sliding_window, soft_cap, BLOCK_TOKENS)

    def attend_tiles(step, out):
        row = lax.dynamic_slice_in_dim(tile_rows, step * together, together)
        first_token = lax.dynamic_slice_in_dim(tile_tokens, step * together, together)
        spans, token = _tile_spans(
            row, first_token, page_table, seq_lens, query_start_loc, sliding_window
        )
        queries = _group_queries(q.at[token].get(mode="clip"), k_pages.shape[3])
        tile = _attend(queries, TILE_TOKENS, k_pages, v_pages, layer, spans, options)
        tile = tile.reshape(together, -1, TILE_TOKENS, q.shape[1] // k_pages.shape[3], q.shape[2])
        tile = tile.swapaxes(1, 2).reshape(*token.shape, *q.shape[1:]).astype(q.dtype)
        return out.at[token].set(tile, mode="drop")

    num_steps = (tiles.num_tiles + together - 1) // together
    out = lax.fori_loop(0, num_steps, attend_tiles, jnp.zeros_like(q))
    out = mask_queries(out, query_start_loc, first_row)
    if decoded is None:
        return out
    is_decoded = jnp.arange(decoded.shape[0]) < query_start_loc[first_row[0]]
    head = jnp.where(is_decoded[:, None, None], decoded, out[: decoded.shape[0]])
    return out.at[: decoded.shape[0]].set(head)


class _Options(NamedTuple):
    scale: float
    window: int | None
    soft_cap: float | None
    block_tokens: int


class _Spans(NamedTuple):
    """What R groups of queries see of their sequences.

    Attributes:
      page_table: [R, M] int32.
      position: [R] int32, of a group's first query; the others follow.
      first_key: [R] int32, the first key that any of the group sees.
      end_key: [R] int32, the end of the keys that any of the group sees; 0 = no query.
    """

    page_table: jax.Array
    position: jax.Array
    first_key: jax.Array
    end_key: jax.Array


def _is_cpu() -> bool:
    """Whether a step of a loop costs its own work only; on a GPU it also costs launches."""
    return default_backend() == "cpu"


def _tile_spans(
    row: jax.Array,
    first_token: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    window: int | None,
) -> tuple[_Spans, jax.Array]:
    """Spans of some tiles, and their tokens [R, 64]; T or more where a place holds no query."""
    num_rows = seq_lens.shape[0]
    has_work, row = row < num_rows, jnp.minimum(row, num_rows - 1)
    row_end = query_start_loc[row + 1]
    position = seq_lens[row] - (row_end - first_token)
    first_key = jnp.zeros_like(position)
    if window is not None:
        first_key = jnp.maximum(position - window + 1, 0)
    end_token = jnp.minimum(first_token + TILE_TOKENS, row_end)
    end_key = jnp.where(has_work, position + (end_token - first_token), 0)
    token = first_token[:, None] + jnp.arange(TILE_TOKENS)
    valid = has_work[:, None] & (token < end_token[:, None])
    token = jnp.where(valid, token, jnp.iinfo(jnp.int32).max)
    return _Spans(page_table[row], position, first_key, end_key), token


def _group_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Bring [R, Q, N, H] to [R, K, Q * G, H]."""
    tiles, queries, _, head_dim = q.shape
    q = q.reshape(tiles, queries, num_kv_heads, -1, head_dim).swapaxes(1, 2)
    return q.reshape(tiles, num_kv_heads, -1, head_dim)


def _attend(
    q: jax.Array,
    num_queries: int,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    spans: _Spans,
    options: _Options,
) -> jax.Array:
    """Online softmax of q [R, K, Q * G, H] over blocks of keys, as many as the longest needs.

    Returns:
      [R, K, Q * G, H] float32; zero where a query sees no key.
    """
    num_groups, num_kv_heads, num_columns, _ = q.shape
    page_size = k_pages.shape[2]
    pages_a_block = max(1, options.block_tokens // page_size)
    block = pages_a_block * page_size
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = functools.partial(
        jnp.einsum, preferred_element_type=jnp.float32, precision=precision
    )
    group = num_columns // num_queries
    position = spans.position[:, None] + jnp.arange(num_columns, dtype=jnp.int32) // group
    first_block = spans.first_key // block
    num_blocks = jnp.max(-(-spans.end_key // block) - first_block)

    def add_block(step, sums):
        acc, highest, total = sums
        key = (first_block + step)[:, None] * block + jnp.arange(block, dtype=jnp.int32)
        exists = (key >= spans.first_key[:, None]) & (key < spans.end_key[:, None])
        keys, values = _gather_block(k_pages, v_pages, layer, spans, key[:, ::page_size])
        values = jnp.where(exists[:, :, None, None], values, 0)
        logits = multiply("rckh,rkqh->rkcq", keys, q) * options.scale
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        visible = exists[:, :, None] & (key[:, :, None] <= position[:, None])
        if options.window is not None:
            visible &= key[:, :, None] > position[:, None] - options.window
        visible = visible[:, None]
        logits = jnp.where(visible, logits, MASKED)
        new_highest = jnp.maximum(highest, logits.max(2))
        weights = jnp.where(visible, jnp.exp(logits - new_highest[:, :, None]), 0)
        shrink = jnp.exp(highest - new_highest)
        product = multiply("rkcq,rckh->rkqh", weights.astype(values.dtype), values)
        acc = acc * shrink[..., None] + product
        return acc, new_highest, total * shrink + weights.sum(2)

    flat = (num_groups, num_kv_heads, num_columns)
    sums = (jnp.zeros(q.shape, jnp.float32), jnp.full(flat, MASKED), jnp.zeros(flat))
    acc, _, total = lax.fori_loop(0, num_blocks, add_block, sums)
    return acc / jnp.maximum(total, 1e-30)[..., None]


def _gather_block(
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    spans: _Spans,
    page_starts: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One block of K and V for each group, [R, block, K, H]: one gather on the stacked arrays.

    Pages that no query of the group sees are replaced by one that some query does.
    """
    page_size = k_pages.shape[2]
    first_page = spans.first_key // page_size
    last_page = jnp.maximum((spans.end_key - 1) // page_size, first_page)
    index = jnp.clip(page_starts // page_size, first_page[:, None], last_page[:, None])
    ids = jnp.take_along_axis(spans.page_table, index, axis=1, mode="clip")
    ids = jnp.clip(ids, 0, k_pages.shape[1] - 1)  # a row without queries may hold anything

    def gather(pages):
        block = pages.at[layer[0], ids].get(mode="promise_in_bounds")
        return block.reshape(ids.shape[0], -1, *pages.shape[3:])

    return gather(k_pages), gather(v_pages)
