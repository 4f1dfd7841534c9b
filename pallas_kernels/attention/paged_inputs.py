"""Checks and index arithmetic that every version of paged attention shares."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryTiles(NamedTuple):
    """Query tiles of a ragged batch; a tile holds queries of one row only.

    Attributes:
      row: [tiles] int32, the row of each tile; S for a tile without work.
      first_token: [tiles] int32, index in [T, ...] of the tile's place 0. It is a multiple of
        `alignment`, so it may lie before the row's own first token.
      num_tiles: [] int32, how many tiles have work; they come first.
    """

    row: jax.Array
    first_token: jax.Array
    num_tiles: jax.Array


class PrefillTiles(NamedTuple):
    """Query tiles as the prefill kernel reads them; those that see most keys come first.

    Attributes:
      tiles: [tiles, 5] int32: row; token of place 0; first and end of the tile's tokens that are
        the row's; position of place 0 in the row's sequence, negative where that token is not the
        row's; or the position of all queries, where they have but one.
      counts: [3] int32: tiles with work; first token with a tile; end of the tokens with one.
    """

    tiles: jax.Array
    counts: jax.Array


def check_paged_inputs(
    query: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array
) -> None:
    """Refuse shapes that no version of paged attention can read.

    Args:
      query: [T, N, H].
      k_pages: [L, P, B, K, H].
      v_pages: as k_pages.
      page_table: [S, M] int32.

    Raises:
      ValueError: a rank or a size does not fit.
    """
    if query.ndim != 3:
        raise ValueError(f"q must be [T, N, H]; got {query.shape=}")
    if k_pages.ndim != 5 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must both be [L, P, B, K, H] of one dtype; got "
            f"{k_pages.shape=} {k_pages.dtype}, {v_pages.shape=} {v_pages.dtype}"
        )
    if query.shape[2] != k_pages.shape[4]:
        raise ValueError(f"q must have the pages' head dim {k_pages.shape[4]}; got {query.shape=}")
    if query.shape[1] % k_pages.shape[3]:
        raise ValueError(
            f"query heads must be a multiple of the {k_pages.shape[3]} KV heads; "
            f"got {query.shape[1]}"
        )
    if page_table.ndim != 2:
        raise ValueError(f"page_table must be [S, M]; got {page_table.shape=}")


def max_query_tiles(num_tokens: int, num_rows: int, tile_tokens: int, alignment: int = 1) -> int:
    """Most tiles that `num_rows` rows with `num_tokens` queries together can need."""
    rows = min(num_rows, num_tokens)
    return (num_tokens + rows * (tile_tokens + alignment - 2)) // tile_tokens


def plan_query_tiles(
    query_start_loc: jax.Array,
    first_row: jax.Array,
    *,
    num_tokens: int,
    tile_tokens: int,
    alignment: int = 1,
) -> QueryTiles:
    """Cut the queries of rows `first_row[0]` and later into tiles, in the rows' order.

    Args:
      query_start_loc: [S + 1] int32, cumulative query offsets.
      first_row: [1] int32; earlier rows get no tile.
      num_tokens: T, the padded number of tokens.
      tile_tokens: places a tile.
      alignment: tiles start at multiples of it; divides `tile_tokens`.

    Returns:
      Arrays of `max_query_tiles(...)` tiles, those with work first.
    """
    num_rows = query_start_loc.shape[0] - 1
    starts = query_start_loc[:-1]
    lengths = query_start_loc[1:] - starts
    lengths = jnp.where(jnp.arange(num_rows) >= first_row[0], lengths, 0)
    aligned = starts - starts % alignment
    tiles = jnp.where(lengths > 0, (starts - aligned + lengths + tile_tokens - 1) // tile_tokens, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(
        max_query_tiles(num_tokens, num_rows, tile_tokens, alignment), dtype=jnp.int32
    )
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    known = jnp.minimum(row, num_rows - 1)
    first = aligned[known] + (index - (ends - tiles)[known]) * tile_tokens
    return QueryTiles(row, jnp.where(row < num_rows, first, 0).astype(jnp.int32), ends[-1])


def plan_prefill_tiles(
    query_start_loc: jax.Array,
    first_row: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
    tile_tokens: int,
    alignment: int,
    is_one_position: bool = False,
) -> PrefillTiles:
    """Describe the tiles of `plan_query_tiles`, longest work first.

    Args:
      query_start_loc: [S + 1] int32, cumulative query offsets.
      first_row: [1] int32; earlier rows get no tile.
      seq_lens: [S] int32, tokens in cache, this step's included.
      num_tokens: T, the padded number of tokens.
      tile_tokens: places a tile.
      alignment: tiles start at multiples of it; divides `tile_tokens`.
      is_one_position: all queries of a row stand at its last position.
    """
    row, first_token, num_tiles = plan_query_tiles(
        query_start_loc,
        first_row,
        num_tokens=num_tokens,
        tile_tokens=tile_tokens,
        alignment=alignment,
    )
    has_work = jnp.arange(row.shape[0]) < num_tiles
    row = jnp.where(has_work, row, 0)
    start, end = query_start_loc[row], query_start_loc[row + 1]
    base = seq_lens[row] - (end - first_token)
    first = jnp.maximum(first_token, start)
    last = jnp.minimum(first_token + tile_tokens, end)
    num_keys = jnp.where(has_work, base + (last - first_token), 0)
    if is_one_position:
        base, num_keys = seq_lens[row] - 1, jnp.where(has_work, seq_lens[row], 0)
    tiles = jnp.stack([row, first_token, first, last, base], axis=1)[jnp.argsort(-num_keys)]
    counts = jnp.stack([num_tiles, query_start_loc[first_row[0]], query_start_loc[-1]])
    return PrefillTiles(tiles.astype(jnp.int32), counts.astype(jnp.int32))


def mask_queries(out: jax.Array, query_start_loc: jax.Array, first_row: jax.Array) -> jax.Array:
    """Zero the tokens of [T, ...] that belong to no row, or to one before `first_row[0]`."""
    token = jnp.arange(out.shape[0])
    valid = (token >= query_start_loc[first_row[0]]) & (token < query_start_loc[-1])
    return jnp.where(valid[:, None, None], out, 0)
