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
    check_mosaic_inputs,
)
from pallas_kernels.attention.paged_inputs import (
    PrefillTiles,
    check_paged_inputs,
    max_query_tiles,
    plan_prefill_tiles,
)
from pallas_kernels.attention.prefill_load import (
    QUERY_BUFFERS,
    Queries,
    Ring,
    load_all,
    ring_scratch,
)
from pallas_kernels.attention.prefill_output import write_other_tokens, write_tile
from pallas_kernels.attention.prefill_schedule import Tile, attend, begin_turns, end_turns, skip
from pallas_kernels.attention.prefill_work import (
    BlockPlan,
    Refs,
    for_each_work,
    place_of,
    rows_of,
    span_of,
    tile_heads,
    tile_tokens,
)
from pallas_kernels.attention.tuning import PrefillTuningConfig, prefill_tuning
from pallas_kernels.platform import gpu_kind

ALIGNMENT = 8  # TMA reads q in tiles of 8 tokens
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
    group = q.shape[1] // k_pages.shape[3]
    if tiles is None:
        tiles = prefill_tiles(
            query_start_loc,
            first_row,
            seq_lens,
            num_tokens=q.shape[0],
            head_dim=q.shape[2],
            dtype=q.dtype,
            group=group,
            is_one_position=is_one_position,
            tuning=tuning,
        )
    max_tiles = max_query_tiles(
        q.shape[0], seq_lens.shape[0], tile_tokens(tuning, group), ALIGNMENT
    )
    _check_prefill_inputs(q, decoded, tiles, max_tiles, scale)
    plan = BlockPlan(
        group=group,
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
        tile_heads=tile_heads(tuning, group),
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
    group: int,
    is_one_position: bool = False,
    tuning: PrefillTuningConfig | None = None,
) -> PrefillTiles:
    """Cut the queries into tiles; all layers of one stored head dim and group can share them.

    Args:
      query_start_loc: [S + 1] int32, as for `prefill_attention`.
      first_row: [1] int32, likewise.
      seq_lens: [S] int32, likewise.
      num_tokens: T.
      head_dim: stored head dim H.
      dtype: of q.
      group: query heads a KV head.
      is_one_position: as for `prefill_attention`.
      tuning: as for `prefill_attention`.
    """
    tuning = tuning or prefill_tuning(gpu_kind(), head_dim, dtype)
    return plan_prefill_tiles(
        query_start_loc,
        first_row,
        seq_lens,
        num_tokens=num_tokens,
        tile_tokens=tile_tokens(tuning, group),
        alignment=ALIGNMENT,
        is_one_position=is_one_position,
    )


def _check_prefill_inputs(
    q: jax.Array, decoded: jax.Array | None, tiles: PrefillTiles, max_tiles: int, scale: float
) -> None:
    """Refuse what only the prefill kernel cannot read."""
    if scale <= 0:
        raise ValueError(f"scale must be positive; got {scale}")
    if decoded is not None and (decoded.shape[1:] != q.shape[1:] or decoded.dtype != q.dtype):
        raise ValueError(
            f"decoded must be [D, {q.shape[1]}, {q.shape[2]}] {q.dtype}; "
            f"got {decoded.shape=} {decoded.dtype}"
        )
    if tiles.tiles.shape != (max_tiles, 5):
        raise ValueError(f"tiles must be made for q: {(max_tiles, 5)}; got {tiles.tiles.shape=}")


class _Shared(NamedTuple):
    """Shared memory and barriers of a thread block, or what to allocate for them."""

    ring: Ring
    queries: Queries
    weights: Any  # [warpgroups, 64, block] where `plan.p_in_smem`
    staged: Any  # two views [warpgroups, 64, H] of the same memory, swizzled and plain
    turns: Any  # barrier of the computing warpgroups, where `tuning.ping_pong`
    copied: Any  # barriers, one for each computing warpgroup


def _launch(
    plan: BlockPlan,
    tuning: PrefillTuningConfig,
    q: jax.Array,
    inputs: tuple[jax.Array, ...],
    decoded: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Run the kernel in `tuning.num_programs` thread blocks, or fewer if there cannot be work."""
    num_tokens, num_heads, _ = q.shape
    items = inputs[-2].shape[0] * num_heads // plan.tile_heads
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


def _kernel(plan: BlockPlan, tuning: PrefillTuningConfig, has_decoded: bool, *args: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    refs = Refs(*(args if has_decoded else (*args[:-1], None, args[-1])))
    computing = tuning.compute_warpgroups

    def run(shared: _Shared):
        @pl.when(lax.axis_index("wg") < computing)
        def _compute():
            if computing > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _compute_all(plan, refs, shared, computing)

        @pl.when(lax.axis_index("wg") == computing)
        def _load():
            if computing > 1:
                plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            load_all(plan, refs, shared.ring, shared.queries)

    pl.run_scoped(run, _scratch(plan, tuning), collective_axes="wg")


def _scratch(plan: BlockPlan, tuning: PrefillTuningConfig) -> _Shared:
    """What a thread block allocates."""
    computing = tuning.compute_warpgroups
    tile = (computing, TILE_ROWS, plan.head_dim)
    queries = plgpu.SMEM((QUERY_BUFFERS, *tile), plan.dtype, transforms=TILED)
    per_buffer = plgpu.Barrier(num_arrivals=computing, num_barriers=QUERY_BUFFERS)
    weights = plgpu.SMEM((computing, TILE_ROWS, plan.block), plan.dtype, transforms=TILED)
    staged = (plgpu.SMEM(tile, plan.dtype, transforms=TILED), plgpu.SMEM(tile, plan.dtype))
    return _Shared(
        ring=ring_scratch(plan, computing),
        queries=Queries(queries, per_buffer, per_buffer),
        weights=weights if plan.p_in_smem else None,
        staged=plgpu.RefUnion(*staged),
        turns=plgpu.Barrier(num_arrivals=2) if tuning.ping_pong else None,
        copied=plgpu.Barrier(num_barriers=computing),
    )


def _compute_all(plan: BlockPlan, refs: Refs, shared: _Shared, warpgroups: int) -> None:
    """Attend this warpgroup's 64 rows of all items; first, copy what needs no attention."""
    warpgroup = lax.axis_index("wg")
    queries, turns = shared.queries, shared.turns
    staged = tuple(ref.at[warpgroup] for ref in shared.staged)
    weights = None if shared.weights is None else shared.weights.at[warpgroup]
    write_other_tokens(refs, staged[1], shared.copied.at[warpgroup], warpgroups)
    begin_turns(turns, warpgroup)

    def compute(works, index, position, _):
        work, buffer = works[0], lax.rem(index, jnp.int32(QUERY_BUFFERS))
        tile = Tile(
            ring=shared.ring,
            queries=queries.tiles.at[buffer, warpgroup],
            queries_free=queries.free.at[buffer],
            weights=weights,
            turns=turns,
        )
        first_token, head = place_of(plan, work, warpgroup)
        first, count = rows_of(work, first_token)
        plgpu.barrier_wait(queries.full.at[buffer])

        @pl.when(count > 0)
        def _attend():
            acc, total = attend(plan, tile, span_of(plan, work, first_token), position)
            acc = acc * lax.broadcast_in_dim(1 / jnp.maximum(total, 1e-30), acc.shape, [0])
            out = refs.out.at[:, head]
            write_tile(acc.astype(plan.dtype), staged, out, first_token, first, count)

        pl.when(count == 0)(lambda: skip(plan, tile, work.steps, position))

    for_each_work(plan, refs, compute)
    end_turns(turns, warpgroup)
    plgpu.wait_smem_to_gmem(0)
