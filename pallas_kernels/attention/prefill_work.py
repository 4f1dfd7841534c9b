"""Plan and work of the prefill kernel: which program does what, which blocks a tile attends to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.mosaic_attention import TILE_ROWS
from pallas_kernels.attention.tuning import PrefillTuningConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Static numbers of one prefill kernel.

    Attributes:
      group: query heads a KV head.
      head_dim: stored head dim H.
      page_size: B.
      block: keys a tile.
      stages: K tiles (and as many V tiles) in flight.
      scale: multiplies the logits.
      window: keys that a query sees, its own included; None = all.
      soft_cap: bound of the logits; None = none.
      dtype: of q, pages and output.
      p_in_smem: the weights go to WGMMA through shared memory, as interpret mode needs.
      is_one_position: all queries of a row stand at its last position.
      tile_heads: query heads of a KV head in one query tile: 1, or a warpgroup each.
    """

    group: int
    head_dim: int
    page_size: int
    block: int
    stages: int
    scale: float
    window: int | None
    soft_cap: float | None
    dtype: Any
    p_in_smem: bool
    is_one_position: bool
    tile_heads: int

    @property
    def copies(self) -> int:
        """Page copies that fill one tile of K."""
        return max(1, self.block // self.page_size)

    @property
    def halves_blocks(self) -> bool:
        """Whether a block is cut to its first 64 keys where no query sees the others."""
        return self.block == 2 * TILE_ROWS


def tile_heads(tuning: PrefillTuningConfig, group: int) -> int:
    """Query heads in a tile: one for each computing warpgroup, where a KV head's heads allow it.

    The tile has fewer queries then, so that short prompts leave less of it empty: by this, half
    blocks and pages left out, 240 prompts of 34 tokens take 169 us instead of 299 (H200, 32 heads).
    """
    return tuning.compute_warpgroups if group % tuning.compute_warpgroups == 0 else 1


def tile_tokens(tuning: PrefillTuningConfig, group: int) -> int:
    """Queries of each head in a tile."""
    return TILE_ROWS * tuning.compute_warpgroups // tile_heads(tuning, group)


class Refs(NamedTuple):
    """Arrays in global memory."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    layer: Any
    tiles: Any
    counts: Any
    decoded: Any  # or None
    out: Any


class Work(NamedTuple):
    """The share of `plan.tile_heads` query heads of one query tile, int32 scalars.

    Tokens count along [T, ...], positions and keys along the sequence.
    """

    head: jax.Array  # the first
    row: jax.Array
    first_token: jax.Array  # of place 0 of the tile, aligned
    tokens: tuple[jax.Array, jax.Array]  # [first, end) with queries of this row
    base: jax.Array  # position of place 0, negative where that is another row's; or of all places
    keys: tuple[jax.Array, jax.Array]  # [first, end) that any query sees
    first_block: jax.Array
    steps: jax.Array


class Span(NamedTuple):
    """The blocks that 64 query rows attend to, int32 scalars.

    Blocks `[inner, outer)` are seen whole by every query; the others need masks. Of the blocks
    `[halves, steps)`, one at most, no query sees more than the first 64 keys.
    """

    first_block: jax.Array
    steps: jax.Array
    inner: jax.Array
    outer: jax.Array
    halves: jax.Array
    keys: tuple[jax.Array, jax.Array]  # [first, end) that any query of the tile sees
    base: jax.Array  # position of query row 0, or of all


def for_each_work(
    plan: BlockPlan,
    refs: Refs,
    do: Callable[[list[Work], jax.Array, jax.Array, Any], Any],
    *,
    begin: Callable[[Work], Any] = lambda work: None,
    known: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Call `state = do(works, index, position, state)` for this program's items, one by one.

    Every warpgroup walks the same items, those with most keys first. Every second round goes
    through the programs backwards, so that each program gets as much work. An item's numbers are
    read while the one `known` before it is done.

    Args:
      plan: static numbers.
      refs: arrays in global memory.
      do: gets the item and the `known - 1` after it, how many items and how many K tiles were
        before it, and what the call before it returned. What comes after the last item is some
        tile that may be read.
      begin: makes the state for the first call of its item.
      known: items that `do` gets.

    Returns:
      Number of items and of K tiles.
    """
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    max_tiles, parts = refs.tiles.shape[0], refs.q.shape[1] // plan.tile_heads
    items = refs.counts[0] * parts
    rounds = lax.div(items + (programs - 1), jnp.int32(programs))

    def item(index):
        backwards = lax.rem(index, jnp.int32(2)) == 1
        return index * programs + jnp.where(backwards, programs - 1 - program, program)

    def read(index):
        tile = jnp.minimum(lax.div(item(index), jnp.int32(parts)), max_tiles - 1)
        return tuple(refs.tiles[tile, field] for field in range(5))

    def describe(index, fields):
        head = lax.rem(item(index), jnp.int32(parts)) * plan.tile_heads
        return _describe(plan, head, fields)

    def step(index, carry):
        position, fields, state = carry
        fields = (*fields, read(index + known))
        works = [describe(index + later, fields[later]) for later in range(known)]
        state = do(works, index, position, state)
        return position + works[0].steps, fields[1:], state

    mine = rounds - (item(rounds - 1) >= items).astype(jnp.int32)
    fields = tuple(read(jnp.int32(index)) for index in range(known))
    state = begin(describe(jnp.int32(0), fields[0]))
    position, _, _ = lax.fori_loop(0, mine, step, (jnp.int32(0), fields, state))
    return mine, position


def _describe(plan: BlockPlan, head: jax.Array, fields: tuple[jax.Array, ...]) -> Work:
    row, first_token, first, end, base = fields
    oldest, end_key = base + (first - first_token), base + (end - first_token)
    if plan.is_one_position:
        oldest, end_key = base, base + 1
    first_key = jnp.int32(0)
    if plan.window is not None:
        first_key = jnp.maximum(oldest - plan.window + 1, 0)
    block = jnp.int32(plan.block)
    first_block = lax.div(first_key, block)
    steps = jnp.maximum(lax.div(end_key + (block - 1), block) - first_block, 1)
    keys = (first_key, end_key)
    return Work(head, row, first_token, (first, end), base, keys, first_block, steps)


def place_of(plan: BlockPlan, work: Work, warpgroup: Any) -> tuple[jax.Array, jax.Array]:
    """Token of the first of the 64 rows of a warpgroup, and their query head."""
    if plan.tile_heads > 1:
        return work.first_token, work.head + warpgroup
    return work.first_token + warpgroup * TILE_ROWS, work.head


def rows_of(work: Work, first_token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and number of the rows with queries, of a warpgroup's 64 from `first_token` on."""
    first = jnp.clip(work.tokens[0] - first_token, 0, TILE_ROWS)
    return first, jnp.clip(work.tokens[1] - first_token, first, TILE_ROWS) - first


def span_of(plan: BlockPlan, work: Work, first_token: jax.Array) -> Span:
    """The blocks that a warpgroup's 64 rows from `first_token` on attend to."""
    block = jnp.int32(plan.block)
    inner = jnp.int32(0)
    if plan.window is not None:
        seen_by_all = jnp.maximum(work.keys[1] - plan.window, 0)
        inner = lax.div(seen_by_all + (block - 1), block) - work.first_block
        inner = jnp.clip(inner, 0, work.steps)
    base, first_position, end_key = work.base, work.base, work.keys[1]
    if not plan.is_one_position:
        first_position += work.tokens[0] - work.first_token
        base += first_token - work.first_token
        end_key = jnp.minimum(end_key, base + TILE_ROWS)
    outer = jnp.clip(lax.div(first_position + 1, block) - work.first_block, inner, work.steps)
    halves = work.steps
    if plan.halves_blocks:
        last_key = (work.first_block + work.steps - 1) * block
        is_half = end_key - last_key <= TILE_ROWS
        halves = jnp.maximum(work.steps - is_half.astype(jnp.int32), outer)
    return Span(work.first_block, work.steps, inner, outer, halves, work.keys, base)
