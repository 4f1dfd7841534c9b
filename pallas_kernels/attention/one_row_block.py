"""One thread block of the one-row kernel: its share of a row's keys and values, in registers.

Threads share a key's row in vectors of 16 bytes, so a warpgroup holds `rows` keys at a time. Each
of these places keeps a softmax of its own, so that threads meet only when all keys are seen.
Arithmetic is CUDA cores': for up to 8 queries, loading into registers is shorter than the way of
WGMMA through shared memory.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_attention import LOG2_E, LOWEST, MASKED, to_log2
from pallas_kernels.attention.one_row_inline import read_now, widen
from pallas_kernels.fused.mosaic_rows import (
    MAX_VECTOR,
    WARP_LANES,
    WARPS,
    load,
    over_columns,
    over_rows,
    power_of_two_below,
    rows_layout,
)
from pallas_kernels.fused.rotary_heads import HeadSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Static numbers of one kernel.

    Attributes:
      heads: of the qkv product.
      kv_heads: K.
      group: G, query heads a KV head.
      page_size: B.
      table_width: pages that a page table can hold.
      tile: keys that a block loads at a time.
      clusters: of a KV head of a row.
      blocks: of a cluster.
      lone_rounds: tiles a block that the working clusters must have before another one joins.
      scale: multiplies the logits.
      window: keys that a query sees, its own included; None = all.
      soft_cap: bound of the logits; None = none.
      interpreted: runs on the CPU.
    """

    heads: HeadSizes
    kv_heads: int
    group: int
    page_size: int
    table_width: int
    tile: int
    clusters: int
    blocks: int
    lone_rounds: int
    scale: float
    window: int | None
    soft_cap: float | None
    interpreted: bool

    @property
    def rows(self) -> int:
        """Keys that a warpgroup holds in one register vector each."""
        return WARPS * WARP_LANES * MAX_VECTOR // self.heads.stored

    @property
    def layout(self) -> Any:
        """Of [rows, stored head dim]."""
        return rows_layout(self.rows, self.heads.stored, self.heads.stored // MAX_VECTOR)

    @property
    def pages(self) -> int:
        """Pages that a tile touches."""
        return max(1, self.tile // self.page_size)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(first query head, number) in powers of two; the last may do again what is done."""
        size = power_of_two_below(self.group)
        return tuple((min(i, self.group - size), size) for i in range(0, self.group, size))


class Span(NamedTuple):
    """Int32 scalars: the row's keys that lie in pages before this step.

    Attributes:
      start: first key that is seen.
      end: of the keys; the new token's own position, -1 for a padding row.
      first_tile: that holds `start`.
      tiles: from it on.
      clusters: that share them.
    """

    start: jax.Array
    end: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    clusters: jax.Array


class Tile(NamedTuple):
    """Keys and values, each a vector [rows, stored head dim] for every `rows` of the tile."""

    keys: list[jax.Array]
    values: list[jax.Array]


class State(NamedTuple):
    """Online softmax of one query head, of each place of a key: float32.

    Attributes:
      acc: [rows, stored head dim] weighted values.
      highest: [rows] highest logit.
      total: [rows] weights.
    """

    acc: jax.Array
    highest: jax.Array
    total: jax.Array


def find_span(sizes: Sizes, length: jax.Array) -> Span:
    """What a row of `length` tokens, the new one included, has in its pages."""
    end, tile = length - 1, jnp.int32(sizes.tile)
    start = jnp.int32(0) if sizes.window is None else jnp.maximum(length - sizes.window, 0)
    first_tile = lax.div(start, tile)
    tiles = jnp.maximum(lax.div(end + (sizes.tile - 1), tile) - first_tile, 0)
    share = sizes.blocks * sizes.lone_rounds
    clusters = lax.div(tiles + (share - 1), jnp.int32(share))
    return Span(start, end, first_tile, tiles, jnp.clip(clusters, 1, sizes.clusters))


def read_pages(sizes: Sizes, table: Any, row: jax.Array, span: Span, tile: jax.Array) -> list[Any]:
    """Pages of the row's tile; the null page for what the query does not see."""
    tile, page_size = span.first_tile + tile, jnp.int32(sizes.page_size)
    pages = []
    for place in range(sizes.pages):
        index = lax.div(tile * sizes.tile, page_size) + place
        entry = table.at[row, jnp.minimum(index, sizes.table_width - 1)]
        page = read_now(entry, interpreted=sizes.interpreted)
        first = index * page_size
        is_seen = (first < span.end) & (first + page_size > span.start)
        pages.append(jnp.where(is_seen, page, 0))
    return pages


def load_tile(
    sizes: Sizes, refs: tuple[Any, Any], place: tuple[Any, Any], pages: list[Any], first: jax.Array
) -> Tile:
    """Load a tile of one KV head.

    Args:
      sizes: static numbers.
      refs: k_pages and v_pages.
      place: layer and KV head.
      pages: of `read_pages`.
      first: key of the tile.
    """
    layer, head = place
    offset = jnp.int32(0) if sizes.tile > sizes.page_size else lax.rem(first, sizes.page_size)

    def load_all(ref):
        vectors = []
        for row in range(0, sizes.tile, sizes.rows):
            keys = pl.ds(offset + row % sizes.page_size, sizes.rows)
            source = ref.at[layer, pages[row // sizes.page_size], keys, head]
            vectors.append(plgpu.load(source, layout=sizes.layout, optimized=False))
        return vectors

    return Tile(*map(load_all, refs))


def empty_tile(sizes: Sizes) -> Tile:
    """In the place of a tile that nobody sees."""
    zeros = jnp.zeros((sizes.rows, sizes.heads.stored), sizes.heads.dtype)
    vectors = [plgpu.layout_cast(zeros, sizes.layout)] * (sizes.tile // sizes.rows)
    return Tile(vectors, vectors)


def first_key(sizes: Sizes, span: Span, tile: jax.Array) -> jax.Array:
    """Position of the first key of a tile of the span."""
    return (span.first_tile + tile) * sizes.tile


def load_queries(sizes: Sizes, ref: Any) -> list[jax.Array]:
    """float32[G, stored head dim] in shared memory -> [rows, stored head dim] of each head.

    Where no cap comes between, they are scaled here, and not each of their logits.
    """
    queries = [_load_shared_row(sizes, ref.at[head]) for head in range(sizes.group)]
    if sizes.soft_cap is not None:
        return queries
    return [query * (sizes.scale * LOG2_E) for query in queries]


def _load_shared_row(sizes: Sizes, ref: Any) -> jax.Array:
    return over_rows(load(ref, sizes.layout.reduce((0,))), sizes.rows, sizes.layout)


def begin(sizes: Sizes, queries: list[jax.Array], new: Any, is_owner: jax.Array) -> list[State]:
    """The states before the first tile: the new token's in the block that owns it, or empty.

    Args:
      sizes: static numbers.
      queries: of `load_queries`.
      new: float32[2, stored head dim] in shared memory, its key and value; anything elsewhere.
      is_owner: whether the new token is this block's.
    """
    key, value = (_load_shared_row(sizes, new.at[kind]) for kind in range(2))
    place = jnp.where(is_owner, 0, -1)
    value = jnp.where(_iota(sizes, 2) == place, value, jnp.zeros_like(value))
    is_new = _iota(sizes, 1) == place
    states = []
    for query in queries:
        logits = _logits(sizes, query, key)
        highest = jnp.where(is_new, logits, jnp.full_like(logits, LOWEST))
        total = jnp.where(is_new, jnp.ones_like(logits), jnp.zeros_like(logits))
        states.append(State(value, highest, total))
    return states


def attend_tile(
    sizes: Sizes,
    queries: list[jax.Array],
    tile: Tile,
    first: jax.Array,
    span: Span,
    states: list[State],
) -> list[State]:
    """Add the keys of a tile that begins at key `first`; of it, only those in the span count."""
    logits: list[list[jax.Array]] = [[] for _ in queries]
    for number, vector in enumerate(tile.keys):
        keys = widen(vector, sizes.layout, interpreted=sizes.interpreted)
        is_seen = _is_seen(sizes, 1, first + number * sizes.rows, span)
        for query, found in zip(queries, logits, strict=True):
            x = _logits(sizes, query, keys)
            found.append(jnp.where(is_seen, x, jnp.full_like(x, MASKED)))
    weights, shrunk = [], []
    for found, state in zip(logits, states, strict=True):
        highest = functools.reduce(jnp.maximum, found, state.highest)
        shrink = jnp.exp2(state.highest - highest)
        weights.append([jnp.exp2(x - highest) for x in found])
        total = functools.reduce(jnp.add, weights[-1], state.total * shrink)
        shrunk.append(State(state.acc * _over_columns(sizes, shrink), highest, total))
    accs = [state.acc for state in shrunk]
    for number, vector in enumerate(tile.values):
        # A weight of 0 times NaN would be NaN.
        is_seen = _is_seen(sizes, 2, first + number * sizes.rows, span)
        values = widen(vector, sizes.layout, interpreted=sizes.interpreted)
        values = jnp.where(is_seen, values, jnp.zeros_like(values))
        accs = [
            acc + _over_columns(sizes, weight[number]) * values
            for acc, weight in zip(accs, weights, strict=True)
        ]
    return [state._replace(acc=acc) for state, acc in zip(shrunk, accs, strict=True)]


def _logits(sizes: Sizes, query: jax.Array, keys: jax.Array) -> jax.Array:
    """[rows] in base 2."""
    products = jnp.sum(query * keys, axis=1)
    return products if sizes.soft_cap is None else to_log2(products, sizes.scale, sizes.soft_cap)


def _is_seen(sizes: Sizes, axes: int, first: jax.Array, span: Span) -> jax.Array:
    """Whether keys from `first` on lie in the span, [rows] or [rows, stored head dim]."""
    key = _iota(sizes, axes)
    return (key >= span.start - first) & (key < span.end - first)


def _iota(sizes: Sizes, axes: int) -> jax.Array:
    """Number of the place, [rows] or [rows, stored head dim]."""
    shape = (sizes.rows, sizes.heads.stored)[:axes]
    layout = sizes.layout if axes == 2 else sizes.layout.reduce((1,))
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)


def _over_columns(sizes: Sizes, rows: jax.Array) -> jax.Array:
    return over_columns(rows, sizes.heads.stored, sizes.layout)
