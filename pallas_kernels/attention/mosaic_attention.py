"""Pieces of the Mosaic GPU attention kernels: checks, page copies, products of one block."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cacheable_kernels import make_kernels_cacheable

make_kernels_cacheable()

STORED_HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
TILE_ROWS = 64  # rows of one WGMMA
MASKED = -1e30  # a logit that no key has; finite, so that MASKED - MASKED is not NaN
# Above MASKED times any scale. Where a row has only masked keys yet, the highest stays at it, so
# that their weights are 0: of two equal huge numbers, one in a fused multiply-add is not rounded.
LOWEST = -1e20
LOG2_E = math.log2(math.e)

# What WGMMA reads from shared memory.
TILED: Any = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)

# Rows lie within warps, so the sums over columns need no shared memory of their own.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    reduction_scratch_bytes=0,
)

# (weighted values [64, H], highest logit [64], sum of weights [64]), all float32
Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Static numbers of one kernel.

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
    is_one_position: bool = False

    @property
    def copies(self) -> int:
        """Page copies that fill one tile of K."""
        return max(1, self.block // self.page_size)


class Ring(NamedTuple):
    """Tiles of K and V in shared memory [stages, block, H], and who may touch them."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


def check_mosaic_inputs(q: jax.Array, k_pages: jax.Array) -> None:
    """Refuse what the Mosaic GPU attention kernels cannot read.

    Raises:
      ValueError: dtype, head dim, page size or heads a KV head.
    """
    _, _, page_size, num_kv_heads, head_dim = k_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype:
        raise ValueError(
            "q and pages must both be bfloat16 or both float16; "
            f"got {q.dtype} and {k_pages.dtype}; use the xla backend"
        )
    if head_dim not in STORED_HEAD_DIMS:
        raise ValueError(f"stored head dim must be one of {STORED_HEAD_DIMS}; got {head_dim}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page size must be one of {PAGE_SIZES}; got {page_size}")
    if q.shape[1] // num_kv_heads > TILE_ROWS:
        raise ValueError(
            f"query heads a KV head must be at most {TILE_ROWS}; got {q.shape[1] // num_kv_heads}"
        )


def ring_scratch(plan: BlockPlan, num_consumers: int) -> Ring:
    """Scratch of one ring of K and V tiles that `num_consumers` warpgroups read."""
    tile = plgpu.SMEM((plan.stages, plan.block, plan.head_dim), plan.dtype, transforms=TILED)
    full = plgpu.Barrier(num_arrivals=plan.copies, num_barriers=plan.stages)
    free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=plan.stages)
    return Ring(tile, tile, full, full, free, free)


def load_blocks(
    plan: BlockPlan,
    ring: Ring,
    refs: tuple[Any, Any, Any, Any],
    *,
    row: jax.Array,
    kv_head: jax.Array,
    first_block: jax.Array,
    steps: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    position: jax.Array | int = 0,
) -> None:
    """Fetch `steps` blocks of K and V of one row into the ring, page by page.

    Args:
      plan: static numbers.
      ring: where to.
      refs: k_pages, v_pages, page_table and layer in global memory.
      row: of the page table.
      kv_head: which KV head.
      first_block: the row's block to begin with.
      steps: number of blocks.
      keys: `[first, end)`, the keys that anyone sees; no table entry outside is read.
      position: tiles that went through the ring before.
    """
    k_ref, v_ref, table_ref, layer_ref = refs
    layer = layer_ref[0]
    page_size = jnp.int32(plan.page_size)
    first_page = lax.div(keys[0], page_size)
    last_page = jnp.maximum(lax.div(keys[1] - 1, page_size), first_page)

    def page_ids(step):
        page = lax.div((first_block + step) * plan.block, page_size)
        return tuple(
            table_ref[row, jnp.clip(page + j, first_page, last_page)] for j in range(plan.copies)
        )

    def fetch(ref, tiles, full, slot, ids, step):
        if plan.page_size <= plan.block:
            for j, page in enumerate(ids):
                place = pl.ds(j * plan.page_size, plan.page_size)
                source = ref.at[layer, page, :, kv_head]
                plgpu.copy_gmem_to_smem(source, tiles.at[slot, place], full.at[slot])
        else:
            offset = lax.rem((first_block + step) * plan.block, page_size)
            source = ref.at[layer, ids[0], pl.ds(offset, plan.block), kv_head]
            plgpu.copy_gmem_to_smem(source, tiles.at[slot], full.at[slot])

    def load(step, ids):
        next_ids = page_ids(step + 1)  # read early: its latency passes behind the waits
        slot = lax.rem(position + step, jnp.int32(plan.stages))
        for ref, tiles, full, free in (
            (k_ref, ring.k, ring.k_full, ring.k_free),
            (v_ref, ring.v, ring.v_full, ring.v_free),
        ):

            @pl.when(position + step >= plan.stages)
            def _until_free(free=free):
                plgpu.barrier_wait(free.at[slot])

            fetch(ref, tiles, full, slot, ids, step)
        return next_ids

    @pl.when(steps > 0)
    def _load():
        lax.fori_loop(0, steps, load, page_ids(jnp.int32(0)))


def drain_ring(plan: BlockPlan, ring: Ring, position: jax.Array) -> None:
    """Wait until all `position` tiles are consumed, so that no barrier dies in use."""

    @pl.loop(jnp.maximum(position - plan.stages, 0), position)
    def _drain(tile):
        slot = lax.rem(tile, jnp.int32(plan.stages))
        plgpu.barrier_wait(ring.k_free.at[slot])
        plgpu.barrier_wait(ring.v_free.at[slot])


def empty_sums(plan: BlockPlan) -> Sums:
    """The sums before the first block."""
    shape, by_row = (TILE_ROWS, plan.head_dim), plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((TILE_ROWS,), LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), by_row),
    )


def to_log2(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """From q @ k to logits in base 2, so that softmax takes exp2."""
    if soft_cap is None:
        return products * (scale * LOG2_E)
    # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1): the hardware's own tanh has but 11 bits.
    slope, cap = 2 * scale / soft_cap * LOG2_E, soft_cap * LOG2_E
    return cap - (2 * cap) / (jnp.exp2(products * slope) + 1)


def zero_values_outside(values: Any, first: jax.Array, end: jax.Array) -> None:
    """Zero the rows of a V tile outside `[first, end)`: a weight of 0 times NaN would be NaN."""
    block, head_dim = values.shape
    width = min(head_dim, 128)
    for start in range(0, block, TILE_ROWS):

        @pl.when((first > start) | (end < start + TILE_ROWS))
        def _zero(start=start):
            shape = (TILE_ROWS, width)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + start
            for column in range(0, head_dim, width):  # in parts: registers are scarce
                part = values.at[pl.ds(start, TILE_ROWS), pl.ds(column, width)]
                loaded = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                part[...] = jnp.where((key >= first) & (key < end), loaded, jnp.zeros_like(loaded))
            plgpu.commit_smem()


def add_values(plan: BlockPlan, acc: jax.Array, p: jax.Array, weights: Any, values: Any) -> Any:
    """Compute acc + p @ values."""
    if not plan.p_in_smem:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))(
            plgpu.WGMMAAccumulatorRef.init(acc)
        )

    def multiply_values(product):
        weights[...] = p
        plgpu.commit_smem()
        plgpu.wgmma(product, weights, values)
        return product[...]

    shape = (TILE_ROWS, plan.head_dim)
    return acc + pl.run_scoped(multiply_values, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
