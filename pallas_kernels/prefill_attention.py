"""Paged prefill attention in Pallas Mosaic GPU (Hopper): ragged queries, prompts and chunks."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_attention import (
    COMPILER_PARAMS,
    TILE_ROWS,
    TILED,
    BlockPlan,
    Ring,
    Sums,
    attend_block,
    check_mosaic_inputs,
    drain_ring,
    empty_sums,
    load_blocks,
    ring_scratch,
)
from pallas_kernels.paged_inputs import (
    check_paged_inputs,
    mask_queries,
    max_query_tiles,
    plan_query_tiles,
)
from pallas_kernels.platform import gpu_kind
from pallas_kernels.tuning import PrefillTuningConfig, prefill_tuning

ALIGNMENT = 8  # TMA reads q in tiles of 8 tokens


@functools.partial(
    jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "interpret", "tuning")
)
def prefill_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    first_row: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
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
      scale: multiplies the logits.
      sliding_window: a query at position p sees the keys `(p - sliding_window, p]`; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      [T, N, H] in q's dtype; zero for the tokens of earlier rows and of no row.

    Raises:
      ValueError: shapes, dtypes, head dim, page size or heads do not fit.

    Source: Kwon et al. 2023 (paged attention); Shah et al. 2024 (FlashAttention-3: warpgroups
    that load and that compute).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    check_mosaic_inputs(q, k_pages)
    tuning = tuning or prefill_tuning(gpu_kind(), q.shape[2], q.dtype)
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
    )
    tiles = plan_query_tiles(
        query_start_loc,
        first_row,
        num_tokens=q.shape[0],
        tile_tokens=TILE_ROWS * tuning.compute_warpgroups,
        alignment=ALIGNMENT,
    )
    inputs = (k_pages, v_pages, page_table, layer, seq_lens, query_start_loc)
    tile_inputs = (tiles.row, tiles.first_token, tiles.num_tiles.reshape(1))
    out = _launch(plan, tuning, q, (*inputs, *tile_inputs), interpret)
    return mask_queries(out, query_start_loc, first_row)


def _launch(plan: BlockPlan, tuning: PrefillTuningConfig, q: jax.Array, inputs, interpret):
    """Run the kernel; tokens without a tile are left unwritten."""
    num_tokens, num_heads, _ = q.shape
    num_rows = inputs[4].shape[0]
    tile_tokens = TILE_ROWS * tuning.compute_warpgroups
    items = max_query_tiles(num_tokens, num_rows, tile_tokens, ALIGNMENT) * num_heads
    run = plgpu.kernel(
        functools.partial(_kernel, plan, tuning, num_heads),
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
    return run(q, *inputs)[0]


class _Refs(NamedTuple):
    """Arrays in global memory."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    layer: Any
    seq_lens: Any
    query_start_loc: Any
    tile_row: Any
    tile_first_token: Any
    num_tiles: Any
    out: Any


class _Work(NamedTuple):
    """One query head's share of one query tile, int32 scalars.

    Tokens count along [T, ...], positions and keys along the sequence.
    """

    head: jax.Array
    row: jax.Array
    first_token: jax.Array  # of place 0 of the tile, aligned
    tokens: tuple[jax.Array, jax.Array]  # [first, end) with queries of this row
    base: jax.Array  # position of place 0; negative where that is another row's
    keys: tuple[jax.Array, jax.Array]  # [first, end) that any query sees
    first_block: jax.Array
    steps: jax.Array


def _kernel(plan: BlockPlan, tuning: PrefillTuningConfig, num_heads: int, *args: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    refs, computing = _Refs(*args), tuning.compute_warpgroups

    def run(ring, scratch, queries_full):
        for_each = functools.partial(_for_each_work, plan, refs, num_heads, computing)

        @pl.when(lax.axis_index("wg") < computing)
        def _compute():
            if computing > 1:
                plgpu.set_max_registers(tuning.compute_registers, action="increase")
            for_each(functools.partial(_compute_work, plan, refs, ring, scratch, queries_full))

        @pl.when(lax.axis_index("wg") == computing)
        def _load():
            if computing > 1:
                plgpu.set_max_registers(tuning.load_registers, action="decrease")
            drain_ring(plan, ring, for_each(functools.partial(_load_work, plan, refs, ring)))

    tile = (computing, TILE_ROWS, plan.head_dim)
    weights = plgpu.SMEM((computing, TILE_ROWS, plan.block), plan.dtype, transforms=TILED)
    scratch = {
        "queries": plgpu.SMEM(tile, plan.dtype, transforms=TILED),
        "weights": weights if plan.p_in_smem else None,
        "out": plgpu.SMEM(tile, plan.dtype),
    }
    pl.run_scoped(
        run,
        ring_scratch(plan, computing),
        scratch,
        plgpu.Barrier(num_barriers=computing),
        collective_axes="wg",
    )


def _for_each_work(plan: BlockPlan, refs: _Refs, num_heads: int, computing: int, do) -> jax.Array:
    """Call `do(work, position)` for this program's items; position = K tiles before it.

    Every warpgroup walks the same items. The last tiles, which see most keys, come first.
    """
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    num_tiles = refs.num_tiles[0]
    mine = lax.div(num_tiles * num_heads - program + (programs - 1), jnp.int32(programs))

    def step(index, position):
        item = program + index * programs
        tile = num_tiles - 1 - lax.div(item, jnp.int32(num_heads))
        work = _describe(plan, refs, tile, lax.rem(item, jnp.int32(num_heads)), computing)
        do(work, position)
        return position + work.steps

    return lax.fori_loop(0, jnp.maximum(mine, 0), step, jnp.int32(0))


def _describe(plan: BlockPlan, refs: _Refs, tile, head, computing: int) -> _Work:
    row, first_token = refs.tile_row[tile], refs.tile_first_token[tile]
    row_start, row_end = refs.query_start_loc[row], refs.query_start_loc[row + 1]
    base = refs.seq_lens[row] - (row_end - first_token)
    tokens = (
        jnp.maximum(first_token, row_start),
        jnp.minimum(first_token + TILE_ROWS * computing, row_end),
    )
    first_key = jnp.int32(0)
    if plan.window is not None:
        first_key = jnp.maximum(base + (tokens[0] - first_token) - plan.window + 1, 0)
    end_key = base + (tokens[1] - first_token)
    block = jnp.int32(plan.block)
    first_block = lax.div(first_key, block)
    steps = lax.div(end_key + (block - 1), block) - first_block
    return _Work(head, row, first_token, tokens, base, (first_key, end_key), first_block, steps)


def _load_work(plan: BlockPlan, refs: _Refs, ring: Ring, work: _Work, position) -> None:
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


def _compute_work(plan, refs: _Refs, ring, scratch, queries_full, work: _Work, position) -> None:
    warpgroup = lax.axis_index("wg")
    scratch = jax.tree.map(lambda ref: ref.at[warpgroup], scratch)
    full = queries_full.at[warpgroup]
    first_token = work.first_token + warpgroup * TILE_ROWS
    source = refs.q.at[pl.ds(first_token, TILE_ROWS), work.head]
    plgpu.copy_gmem_to_smem(source, scratch["queries"], full)
    plgpu.barrier_wait(full)
    acc, _, total = _attend(plan, ring, scratch, work, position)
    inverse = 1 / jnp.maximum(total, 1e-30)
    acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
    scratch["out"][...] = acc.astype(plan.dtype)
    plgpu.commit_smem()
    _store(scratch["out"], refs.out, work, first_token)


def _attend(plan: BlockPlan, ring: Ring, scratch, work: _Work, position) -> Sums:
    """Online softmax of this warpgroup's 64 queries over all blocks of the work."""
    block = jnp.int32(plan.block)
    base = work.base + lax.axis_index("wg") * TILE_ROWS

    def attend(is_edge: bool, step, sums):
        offset = (work.first_block + step) * block

        def visible(query, column):
            seen = column - query <= base - offset
            if plan.window is None:
                return seen
            return seen & (column - query > base - offset - plan.window)

        first_key, end_key = work.keys
        return attend_block(
            plan,
            ring,
            lax.rem(position + step, jnp.int32(plan.stages)),
            scratch["queries"],
            scratch["weights"],
            sums,
            visible=visible if is_edge else None,
            keys=(first_key - offset, end_key - offset) if is_edge else None,
        )

    # Blocks [0, inner) lie before some query's window, [inner, outer) are seen by all queries.
    first_position = work.base + (work.tokens[0] - work.first_token)
    inner, sums = jnp.int32(0), empty_sums(plan)
    if plan.window is not None:
        seen_by_all = jnp.maximum(work.keys[1] - plan.window, 0)
        inner = jnp.clip(
            lax.div(seen_by_all + (block - 1), block) - work.first_block, 0, work.steps
        )
        sums = lax.fori_loop(0, inner, functools.partial(attend, True), sums)
    outer = jnp.clip(lax.div(first_position + 1, block) - work.first_block, inner, work.steps)
    sums = lax.fori_loop(inner, outer, functools.partial(attend, False), sums)
    return lax.fori_loop(outer, work.steps, functools.partial(attend, True), sums)


def _store(staged: Any, out_ref: Any, work: _Work, first_token: jax.Array) -> None:
    """Write the rows of a staged tile [64, H] that are this work's queries, and no others."""
    first = jnp.clip(work.tokens[0] - first_token, 0, TILE_ROWS)
    count = jnp.clip(work.tokens[1] - first_token, first, TILE_ROWS) - first

    def copy(place, size):
        target = out_ref.at[pl.ds(first_token + place, size), work.head]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(place, size)], target)

    @pl.when(count == TILE_ROWS)
    def _all():
        copy(0, TILE_ROWS)

    @pl.when(count < TILE_ROWS)
    def _some():
        eights = lax.div(count, jnp.int32(8))

        @pl.loop(0, eights)
        def _eight(index):
            copy(first + index * 8, 8)

        @pl.loop(0, count - eights * 8)
        def _one(index):
            copy(first + eights * 8 + index, 1)

    plgpu.wait_smem_to_gmem(0)
