"""Paged prefill attention in Pallas Mosaic GPU (Hopper): ragged queries, prompts and chunks."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.attention.mosaic_attention import (
    COMPILER_PARAMS,
    TILE_ROWS,
    TILED,
    BlockPlan,
    Ring,
    check_mosaic_inputs,
    drain_ring,
    load_blocks,
    ring_scratch,
)
from pallas_kernels.attention.paged_inputs import (
    PrefillTiles,
    check_paged_inputs,
    max_query_tiles,
    plan_prefill_tiles,
)
from pallas_kernels.attention.prefill_output import write_other_tokens, write_tile
from pallas_kernels.attention.prefill_schedule import (
    Tile,
    attend,
    begin_turns,
    end_turns,
    skip,
    turns_scratch,
)
from pallas_kernels.attention.prefill_work import Refs, Work, for_each_work, span_of
from pallas_kernels.attention.tuning import PrefillTuningConfig, prefill_tuning
from pallas_kernels.platform import gpu_kind

ALIGNMENT = 8  # TMA reads q in tiles of 8 tokens
# Query tiles in shared memory: the next one is fetched early. With one alone, warpgroups that take
# turns would wait for ever: the later one's last turn needs the other's first of the next tile.
QUERY_BUFFERS = 2
# Registers of a thread where two warpgroups compute: they get most of what the loading one has.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale", "sliding_window", "soft_cap", "is_one_position", "interpret", "tuning",
    ),
)  # fmt: skip
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
    tiles: PrefillTiles | None = None,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    is_one_position: bool = False,
    interpret: Any = None,
    tuning: PrefillTuningConfig | None = None,
) -> jax.Array:
    """Attend the queries of rows `first_row[0]` and later to their cached pages, causally.

    Row s has the tokens `[query_start_loc[s], query_start_loc[s + 1])`; the last of them stands
    at position `seq_lens[s] - 1`. K and V of this step's tokens are already in the pages.

    Args:
      q: [T, N, H] bfloat16 or float16, already rotated.
      k_pages: [L, P, B, K, H] in q's dtype, all pages of all layers; B is 16, 32, 64 or 128.
      v_pages: as k_pages.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; entries past a row's end, and those before its window, are not
        read. Slots past a row's end may hold anything, NaN too.
      seq_lens: [S] int32, tokens in cache, this step's included.
      query_start_loc: [S + 1] int32, cumulative query offsets; a row may have no query.
      first_row: [1] int32; the rows before it (decode rows) are another kernel's.
      decoded: [D, N, H] in q's dtype, results for the first D tokens; those of the rows before
        `first_row[0]` are copied to the output. They must not be more than D. None = zeros.
      tiles: what `prefill_tiles` made of the same rows; None = it is called here.
      scale: multiplies the logits; positive.
      sliding_window: a query at position p sees the keys `(p - sliding_window, p]`; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      is_one_position: all queries of a row stand at position `seq_lens[s] - 1`.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      [T, N, H] in q's dtype; zero for the tokens of no row.

    Raises:
      ValueError: shapes, dtypes, head dim, page size, heads, tiles or scale do not fit.

    Source: Kwon et al. 2023 (paged attention); Shah et al. 2024 (FlashAttention-3).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    check_mosaic_inputs(q, k_pages)
    tuning = tuning or prefill_tuning(gpu_kind(), q.shape[2], q.dtype)
    if tiles is None:
        tiles = prefill_tiles(
            query_start_loc,
            first_row,
            seq_lens,
            num_tokens=q.shape[0],
            head_dim=q.shape[2],
            dtype=q.dtype,
            is_one_position=is_one_position,
            tuning=tuning,
        )
    _check_prefill_inputs(q, decoded, tiles, seq_lens.shape[0], tuning, scale)
    plan = BlockPlan(
        group=q.shape[1] // k_pages.shape[3],
        head_dim=q.shape[2],
        page_size=k_pages.shape[2],
        block=tuning.block_tokens,
        stages=tuning.num_stages,
        scale=scale,
        window=sliding_window,
        soft_cap=soft_cap,
        dtype=q.dtype,
        p_in_smem=interpret is not None,
        is_one_position=is_one_position,
    )
    inputs = (k_pages, v_pages, page_table, layer, *tiles)
    return _launch(plan, tuning, q, inputs, decoded, interpret)


def prefill_tiles(
    query_start_loc: jax.Array,
    first_row: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
    head_dim: int,
    dtype: DTypeLike,
    is_one_position: bool = False,
    tuning: PrefillTuningConfig | None = None,
) -> PrefillTiles:
    """Cut the queries into tiles; all layers of one stored head dim can share them.

    Args:
      query_start_loc: [S + 1] int32, as for `prefill_attention`.
      first_row: [1] int32, likewise.
      seq_lens: [S] int32, likewise.
      num_tokens: T.
      head_dim: stored head dim H.
      dtype: of q.
      is_one_position: as for `prefill_attention`.
      tuning: as for `prefill_attention`.
    """
    tuning = tuning or prefill_tuning(gpu_kind(), head_dim, dtype)
    return plan_prefill_tiles(
        query_start_loc,
        first_row,
        seq_lens,
        num_tokens=num_tokens,
        tile_tokens=TILE_ROWS * tuning.compute_warpgroups,
        alignment=ALIGNMENT,
        is_one_position=is_one_position,
    )


def _check_prefill_inputs(q, decoded, tiles: PrefillTiles, num_rows: int, tuning, scale) -> None:
    """Refuse what only the prefill kernel cannot read."""
    if scale <= 0:
        raise ValueError(f"scale must be positive; got {scale}")
    if decoded is not None and (decoded.shape[1:] != q.shape[1:] or decoded.dtype != q.dtype):
        raise ValueError(
            f"decoded must be [D, {q.shape[1]}, {q.shape[2]}] {q.dtype}; "
            f"got {decoded.shape=} {decoded.dtype}"
        )
    tile_tokens = TILE_ROWS * tuning.compute_warpgroups
    shape = (max_query_tiles(q.shape[0], num_rows, tile_tokens, ALIGNMENT), 5)
    if tiles.tiles.shape != shape:
        raise ValueError(f"tiles must be made for q: {shape}; got {tiles.tiles.shape=}")


def _launch(plan: BlockPlan, tuning: PrefillTuningConfig, q: jax.Array, inputs, decoded, interpret):
    num_tokens, num_heads, _ = q.shape
    items = inputs[-2].shape[0] * num_heads
    has_decoded = decoded is not None
    run = plgpu.kernel(
        functools.partial(_kernel, plan, tuning, has_decoded),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(min(tuning.num_programs, items),),
        grid_names=("program",),
        num_threads=tuning.compute_warpgroups + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    padding = max(TILE_ROWS, num_tokens + -num_tokens % ALIGNMENT) - num_tokens
    if padding:
        q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    return run(q, *inputs, *([decoded] if has_decoded else []))[0]


class _Queries(NamedTuple):
    """Query tiles in shared memory [buffers, warpgroups, 64, H], and who may touch them."""

    tiles: Any
    full: Any
    free: Any


def _kernel(plan: BlockPlan, tuning: PrefillTuningConfig, has_decoded: bool, *args: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    refs = Refs(*(args if has_decoded else (*args[:-1], None, args[-1])))
    computing = tuning.compute_warpgroups

    def run(ring, queries, weights, staged, turns, copied):
        @pl.when(lax.axis_index("wg") < computing)
        def _compute():
            if computing > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            tile = Tile(ring, queries, weights, turns)
            _compute_all(plan, tuning, refs, tile, tuple(staged), copied)

        @pl.when(lax.axis_index("wg") == computing)
        def _load():
            if computing > 1:
                plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            _load_all(plan, tuning, refs, ring, queries)

    tile = (computing, TILE_ROWS, plan.head_dim)
    tiles = plgpu.SMEM((QUERY_BUFFERS, *tile), plan.dtype, transforms=TILED)
    per_buffer = plgpu.Barrier(num_arrivals=computing, num_barriers=QUERY_BUFFERS)
    weights = plgpu.SMEM((computing, TILE_ROWS, plan.block), plan.dtype, transforms=TILED)
    staged = (plgpu.SMEM(tile, plan.dtype, transforms=TILED), plgpu.SMEM(tile, plan.dtype))
    pl.run_scoped(
        run,
        ring_scratch(plan, computing),
        _Queries(tiles, per_buffer, per_buffer),
        weights if plan.p_in_smem else None,
        plgpu.RefUnion(*staged),
        turns_scratch(tuning),
        plgpu.Barrier(num_barriers=computing),
        collective_axes="wg",
    )


def _load_all(plan: BlockPlan, tuning, refs: Refs, ring: Ring, queries: _Queries) -> None:
    """Fetch the queries, keys and values of all items."""
    buffers = jnp.int32(QUERY_BUFFERS)

    def load(work: Work, index, position):
        buffer = lax.rem(index, buffers)
        pl.when(index >= buffers)(lambda: plgpu.barrier_wait(queries.free.at[buffer]))
        for warpgroup in range(tuning.compute_warpgroups):
            first_token = work.first_token + warpgroup * TILE_ROWS
            source = refs.q.at[pl.ds(first_token, TILE_ROWS), work.head]
            target = queries.tiles.at[buffer, warpgroup]
            plgpu.copy_gmem_to_smem(source, target, queries.full.at[buffer])
        load_blocks(
            plan,
            ring,
            (refs.k_pages, refs.v_pages, refs.page_table, refs.layer),
            row=work.row,
            kv_head=lax.div(work.head, jnp.int32(plan.group)),
            first_block=work.first_block,
            steps=work.steps,
            keys=work.keys,
            position=position,
        )

    mine, position = for_each_work(plan, refs, load)
    drain_ring(plan, ring, position)

    @pl.loop(jnp.maximum(mine - buffers, 0), mine)
    def _drain(index):
        plgpu.barrier_wait(queries.free.at[lax.rem(index, buffers)])


def _compute_all(plan: BlockPlan, tuning, refs: Refs, tile: Tile, staged, copied) -> None:
    """Attend this warpgroup's 64 rows of all items; first, copy what needs no attention."""
    warpgroup = lax.axis_index("wg")
    queries, weights = tile.queries, tile.weights
    staged = tuple(ref.at[warpgroup] for ref in staged)
    weights = None if weights is None else weights.at[warpgroup]
    write_other_tokens(refs, staged[1], copied.at[warpgroup], tuning.compute_warpgroups)
    begin_turns(tuning, tile.turns, warpgroup)

    def compute(work: Work, index, position):
        buffer = lax.rem(index, jnp.int32(QUERY_BUFFERS))
        mine = tile._replace(queries=queries.tiles.at[buffer, warpgroup], weights=weights)
        first_token = work.first_token + warpgroup * TILE_ROWS
        first = jnp.clip(work.tokens[0] - first_token, 0, TILE_ROWS)
        count = jnp.clip(work.tokens[1] - first_token, first, TILE_ROWS) - first
        plgpu.barrier_wait(queries.full.at[buffer])

        @pl.when(count > 0)
        def _attend():
            acc, total = attend(plan, mine, span_of(plan, work, warpgroup), position)
            acc = acc * lax.broadcast_in_dim(1 / jnp.maximum(total, 1e-30), acc.shape, [0])
            out = refs.out.at[:, work.head]
            write_tile(acc.astype(plan.dtype), staged, out, first_token, first, count)

        pl.when(count == 0)(lambda: skip(plan, mine, work.steps, position))
        plgpu.barrier_arrive(queries.free.at[buffer])

    for_each_work(plan, refs, compute)
    end_turns(tuning, tile.turns, warpgroup)
    plgpu.wait_smem_to_gmem(0)
