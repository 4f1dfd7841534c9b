"""One thread block of the decode kernel: its shared memory, the page copies, a block's softmax.

Keys are the rows and queries the columns of every product: `keys @ queries^T` and
`values^T @ weights`. So a group of up to 8 query heads costs 8 columns, and not the 64 rows of a
WGMMA, and a warpgroup needs so few registers that several can work on one multiprocessor.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_inline import (
    BY_COLUMN,
    column_reduce,
    scratch_size,
    store_weights,
)
from pallas_kernels.attention.mosaic_attention import (
    MASKED,
    TILED,
    to_log2,
    zero_values_outside,
)

SHARED_BYTES = 226 * 1024  # of a multiprocessor, less 1 KiB for barriers and alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Static numbers of one decode kernel.

    Attributes:
      group: query heads a KV head.
      rows_a_group: rows from one group of queries to the next, in memory.
      num_kv_heads: K.
      head_dim: stored head dim H.
      page_size: B.
      block: keys a tile.
      stages: K tiles (and as many V tiles) in flight for each worker.
      workers: warpgroups that compute.
      scale: multiplies the logits.
      window: keys that a query sees, its own included; None = all.
      soft_cap: bound of the logits; None = none.
      dtype: of q, pages and output.
      interpreted: runs on the CPU.
    """

    group: int
    rows_a_group: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    block: int
    stages: int
    workers: int
    scale: float
    window: int | None
    soft_cap: float | None
    dtype: Any
    interpreted: bool

    @property
    def columns(self) -> int:
        """Query heads a KV head, padded for WGMMA."""
        return -(-self.group // 8) * 8

    @property
    def copies(self) -> int:
        """Page copies that fill one tile of K."""
        return max(1, self.block // self.page_size)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one thread block."""
        ring = 2 * self.workers * self.stages * self.block * self.head_dim * 2
        queries = 2 * self.columns * self.head_dim * 2
        weights = self.workers * self.columns * self.block * 2
        results = max(1, self.workers - 1) * self.columns * (self.head_dim + 2) * 4
        return ring + queries + weights + results + self.workers * scratch_size(self.columns) * 4


class Segment(NamedTuple):
    """Int32 scalars: one range of blocks of one row (see DecodePlan.segments)."""

    row: jax.Array
    length: jax.Array
    first: jax.Array
    steps: jax.Array
    piece: jax.Array
    pieces: jax.Array
    place: jax.Array


class Sums(NamedTuple):
    """Online softmax so far: float32 in registers of one warpgroup.

    Attributes:
      acc: [H, N] weighted values.
      highest: [N] highest logit.
      total: [block, N] weights; their sum over the keys is taken at the end. After that, [N].
    """

    acc: jax.Array
    highest: jax.Array
    total: jax.Array


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block.

    K and V tiles stand in rings, one a worker; tile `w * stages + i` is place `i` of worker `w`.
    """

    k: Any
    v: Any
    queries: Any
    weights: Any
    scratch: Any
    results: Any
    result_sums: Any
    arrived: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    queries_full: Any
    queries_free: Any
    results_full: Any
    results_free: Any


def shared_memory(sizes: Sizes) -> Shared:
    """What to allocate."""
    tiles, others = sizes.workers * sizes.stages, max(1, sizes.workers - 1)
    columns, head_dim, block = sizes.columns, sizes.head_dim, sizes.block

    def tiled(*shape: int) -> Any:
        return plgpu.SMEM(shape, sizes.dtype, transforms=TILED)

    def barriers(number: int, arrivals: int = 1) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    return Shared(
        k=tiled(tiles, block, head_dim),
        v=tiled(tiles, block, head_dim),
        queries=tiled(2, columns, head_dim),
        weights=tiled(sizes.workers, columns, block),
        scratch=plgpu.SMEM((sizes.workers, scratch_size(columns)), jnp.float32),
        results=plgpu.SMEM((others, head_dim, columns), jnp.float32),
        result_sums=plgpu.SMEM((others, 2, columns), jnp.float32),
        arrived=plgpu.SMEM((1,), jnp.int32),
        k_full=barriers(tiles, sizes.copies),
        v_full=barriers(tiles, sizes.copies),
        k_free=barriers(tiles),
        v_free=barriers(tiles),
        queries_full=barriers(2),
        queries_free=barriers(2, sizes.workers),
        results_full=barriers(1, others),
        results_free=barriers(1),
    )


def visible_start(sizes: Sizes, segment: Segment) -> jax.Array:
    """First key of the row that its query sees."""
    if sizes.window is None:
        return jnp.int32(0)
    return jnp.maximum(segment.length - sizes.window, 0)


def steps_of(sizes: Sizes, steps: jax.Array, worker: jax.Array | int) -> jax.Array:
    """How many of a segment's blocks are this worker's: they take turns."""
    return lax.div(steps + (sizes.workers - 1) - worker, jnp.int32(sizes.workers))


def attend_segment(
    sizes: Sizes,
    shared: Shared,
    segment: Segment,
    worker: jax.Array,
    *,
    queries: Any,
    position: jax.Array,
) -> Sums:
    """Attend this worker's blocks of a segment.

    Args:
      sizes: static numbers.
      shared: memory and barriers.
      segment: which keys.
      worker: which warpgroup this is.
      queries: [N, H] in shared memory.
      position: tiles that this worker has consumed before.

    Returns:
      The sums, total [N].
    """
    start = visible_start(sizes, segment)

    def attend(step, sums):
        block = segment.first + worker + step * sizes.workers
        offset = block * sizes.block
        tile = worker * sizes.stages + lax.rem(position + step, jnp.int32(sizes.stages))
        keys = (start - offset, segment.length - offset)
        return _attend_block(sizes, shared, worker, tile, queries, keys, sums)

    steps = steps_of(sizes, segment.steps, worker)
    sums = lax.fori_loop(0, steps, attend, _empty_sums(sizes))
    scratch = shared.scratch.at[worker]
    total = column_reduce("add", sums.total, scratch, interpreted=sizes.interpreted)
    return sums._replace(total=total)


def _empty_sums(sizes: Sizes) -> Sums:
    acc, total = (
        plgpu.layout_cast(jnp.full((rows, sizes.columns), 0, jnp.float32), plgpu.Layout.WGMMA)
        for rows in (sizes.head_dim, sizes.block)
    )
    highest = plgpu.layout_cast(jnp.full((sizes.columns,), MASKED, jnp.float32), BY_COLUMN)
    return Sums(acc, highest, total)


def _attend_block(sizes: Sizes, shared: Shared, worker, tile, queries, keys, sums: Sums) -> Sums:
    """Add one block; of it, only the keys `[first, end)` count, and the others may be NaN."""
    first, end = keys
    shape = (sizes.block, sizes.columns)
    plgpu.barrier_wait(shared.k_full.at[tile])

    def multiply_keys(product):
        plgpu.wgmma(product, shared.k.at[tile], queries.transpose((1, 0)))
        return product[...]

    logits = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    plgpu.barrier_arrive(shared.k_free.at[tile])
    key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    logits = to_log2(logits, sizes.scale, sizes.soft_cap)
    logits = jnp.where((key >= first) & (key < end), logits, MASKED)
    highest = column_reduce("max", logits, shared.scratch.at[worker], interpreted=sizes.interpreted)
    highest = jnp.maximum(sums.highest, highest)
    shrink = jnp.exp2(sums.highest - highest)
    p = jnp.exp2(logits - lax.broadcast_in_dim(highest, shape, [1]))
    total = sums.total * lax.broadcast_in_dim(shrink, shape, [1]) + p
    acc = sums.acc * lax.broadcast_in_dim(shrink, sums.acc.shape, [1])
    # The warps met in column_reduce, so nobody reads the weights of the block before.
    weights = shared.weights.at[worker]
    store_weights(p.astype(sizes.dtype), weights, TILED, interpreted=sizes.interpreted)
    plgpu.commit_smem()
    plgpu.barrier_wait(shared.v_full.at[tile])
    zero_values_outside(shared.v.at[tile], first, end)
    acc = _add_values(sizes, acc, shared.v.at[tile].transpose((1, 0)), weights.transpose((1, 0)))
    plgpu.barrier_arrive(shared.v_free.at[tile])
    return Sums(acc, highest, total)


def _add_values(sizes: Sizes, acc: jax.Array, values: Any, weights: Any) -> Any:
    """Compute acc + values^T @ weights^T."""
    if not sizes.interpreted:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, values, weights))(
            plgpu.WGMMAAccumulatorRef.init(acc)
        )

    def multiply(product):  # interpreted accumulators must be fresh
        plgpu.wgmma(product, values, weights)
        return product[...]

    shape = (sizes.head_dim, sizes.columns)
    return acc + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def merge_sums(one: Sums, other: Sums) -> Sums:
    """Sums of two disjoint sets of keys, as one; total is [N] in both."""
    highest = jnp.maximum(one.highest, other.highest)
    weights = [jnp.exp2(sums.highest - highest) for sums in (one, other)]
    acc, total = (
        a * lax.broadcast_in_dim(weights[0], a.shape, [a.ndim - 1])
        + b * lax.broadcast_in_dim(weights[1], b.shape, [b.ndim - 1])
        for a, b in ((one.acc, other.acc), (one.total, other.total))
    )
    return Sums(acc, highest, total)


def store_sums(sums: Sums, acc: Any, numbers: Any) -> None:
    """Store into acc [H, N] and numbers [2, N]."""
    acc[...] = sums.acc
    numbers.at[0][...] = sums.highest
    numbers.at[1][...] = sums.total


def load_sums(acc: Any, numbers: Any) -> Sums:
    """What `store_sums` stored."""
    return Sums(
        plgpu.load(acc, layout=plgpu.Layout.WGMMA, optimized=False),
        plgpu.load(numbers.at[0], layout=BY_COLUMN, optimized=False),
        plgpu.load(numbers.at[1], layout=BY_COLUMN, optimized=False),
    )
