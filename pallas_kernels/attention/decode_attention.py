"""Paged decode attention in Pallas Mosaic GPU (Hopper): one new query a row, one launch.

The thread blocks stay and work off even shares of all contexts (`decode_plan.py`). In each, one
warpgroup fetches pages ahead, across the borders of rows, and the others take turns at the blocks.
Where a row is cut, its pieces meet in global memory, and the last to come combines them.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_block import (
    SHARED_BYTES,
    Segment,
    Shared,
    Sizes,
    Sums,
    attend_segment,
    load_sums,
    merge_sums,
    shared_memory,
    steps_of,
    store_sums,
)
from pallas_kernels.attention.decode_inline import arrive, store_columns
from pallas_kernels.attention.decode_load import load_segments, read_segment
from pallas_kernels.attention.decode_plan import SHARE_FIELDS, DecodePlan, plan_decode
from pallas_kernels.attention.mosaic_attention import (
    COMPILER_PARAMS,
    MASKED,
    check_mosaic_inputs,
)
from pallas_kernels.attention.paged_inputs import check_paged_inputs
from pallas_kernels.attention.tuning import DecodeTuningConfig, decode_tuning
from pallas_kernels.cacheable_kernels import make_kernels_cacheable
from pallas_kernels.platform import gpu_kind

make_kernels_cacheable()

COMBINED_AT_ONCE = 4  # pieces of a row whose sums are read at the same time


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale", "sliding_window", "soft_cap", "split_tokens", "leaves_padding", "interpret",
        "tuning",
    ),
)  # fmt: skip
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
    leaves_padding: bool = False,
    interpret: Any = None,
    tuning: DecodeTuningConfig | None = None,
    plan: DecodePlan | None = None,
) -> jax.Array:
    """Attend each sequence's newest query to its cached pages.

    Args:
      q: [S, N, H] bfloat16 or float16, one row a sequence, already rotated.
      k_pages: [L, P, B, K, H] in q's dtype, all pages of all layers; B is 16, 32, 64 or 128.
      v_pages: as k_pages.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; entries past a sequence's end, and those before its window,
        are not read. Slots past a sequence's end may hold anything, NaN too.
      seq_lens: [S] int32, tokens in cache, this step's included; 0 = padding row.
      scale: multiplies the logits.
      sliding_window: the query sees this many keys, its own included; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      split_tokens: the context is cut at multiples of it, whatever the batch, so that a row's
        sums do not depend on who shares the batch; None = cut so that the GPU is filled.
      leaves_padding: padding rows stand last, and nobody reads their results.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU, with two workers at
        most: XLA's CPU client has no threads for more on a small machine, and would hang.
      tuning: sizes of the kernel; None = from the table.
      plan: of `plan_decode` for these lengths and options, shared by all layers of a step; None =
        made here.

    Returns:
      [S, N, H] in q's dtype; padding rows are zero, or undefined with `leaves_padding`.

    Raises:
      ValueError: shapes, dtypes, head dim, page size, heads, `split_tokens` or plan do not fit.

    Source: Kwon et al. 2023 (paged attention); Milakov and Gimelshein 2018 (online softmax);
    Dao et al. 2023 (Flash-Decoding, splits of the context); Osama et al. 2023 (Stream-K).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    check_mosaic_inputs(q, k_pages)
    num_rows, _, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[2:4]
    tuning = tuning or decode_tuning(gpu_kind(), head_dim, q.dtype)
    made: DecodePlan = plan or plan_decode(
        seq_lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        max_tokens=page_table.shape[1] * page_size,
        sliding_window=sliding_window,
        split_tokens=split_tokens,
        leaves_padding=leaves_padding,
        tuning=tuning,
    )
    options = (sliding_window, split_tokens, leaves_padding)
    _check_plan(made, (num_rows, num_kv_heads, *options, tuning.block_tokens))
    rows, rows_a_group = _flat_queries(q, num_kv_heads)
    sizes = Sizes(
        group=q.shape[1] // num_kv_heads,
        rows_a_group=rows_a_group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block=tuning.block_tokens,
        stages=tuning.num_stages,
        workers=tuning.num_workers if interpret is None else min(tuning.num_workers, 2),
        scale=scale,
        window=sliding_window,
        soft_cap=soft_cap,
        dtype=q.dtype,
        interpreted=interpret is not None,
    )
    sizes = _fit_shared_memory(sizes, SHARED_BYTES // tuning.programs_per_processor)
    pages = (k_pages, v_pages, page_table, layer)
    return _launch(sizes, made, jax.ShapeDtypeStruct(q.shape, q.dtype), (rows, *pages), interpret)


def _launch(
    sizes: Sizes, plan: DecodePlan, out: jax.ShapeDtypeStruct, inputs: Any, interpret: Any
) -> jax.Array:
    """Run the kernel; its other two outputs are the workspace where pieces meet."""
    partial = (plan.max_pieces, sizes.num_kv_heads)
    run = plgpu.kernel(
        functools.partial(_kernel, sizes),
        out_type=[
            out,
            jax.ShapeDtypeStruct((*partial, sizes.head_dim, sizes.columns), jnp.float32),
            jax.ShapeDtypeStruct((*partial, 2, sizes.columns), jnp.float32),
        ],
        grid=(plan.shares.shape[0], sizes.num_kv_heads),
        grid_names=("share", "head"),  # the heads of a row run side by side
        num_threads=sizes.workers + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(*inputs, plan.shares, plan.segments, plan.counters)[0]


def _check_plan(plan: DecodePlan, asked: tuple[int | None, ...]) -> None:
    options = (plan.sliding_window, plan.split_tokens, plan.leaves_padding)
    made_for = (*plan.counters.shape, *options, plan.block_tokens)
    if made_for != asked:
        raise ValueError(
            "plan must be made for this call's rows, KV heads, sliding_window, split_tokens, "
            f"leaves_padding and block_tokens {asked}; got one for {made_for}"
        )


def _fit_shared_memory(sizes: Sizes, available: int) -> Sizes:
    """Fewer stages, then fewer workers, where the tiles do not fit."""
    while sizes.shared_bytes > available and (sizes.stages > 1 or sizes.workers > 1):
        if sizes.stages > 1:
            sizes = replace(sizes, stages=sizes.stages - 1)
        else:
            sizes = replace(sizes, workers=sizes.workers - 1)
    return sizes


def _flat_queries(q: jax.Array, num_kv_heads: int) -> tuple[jax.Array, int]:
    """View q as rows [S * K * rows a group, H] whose groups lie within tiles of 8 rows.

    TMA reads tiles of 8 rows and fills what a tile lacks with zeros, so a small group may
    begin anywhere in a tile but must not cross into the next. Other groups are padded (a copy).
    """
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    if group % 8 and (8 % group or num_rows * num_heads % 8):
        q = q.reshape(num_rows, num_kv_heads, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, -group % 8), (0, 0)))
        group += -group % 8
    return q.reshape(-1, head_dim), group


def _kernel(sizes: Sizes, *refs: Any) -> None:
    """Allocate shared memory and barriers, then run the warpgroups."""
    q_ref, k_ref, v_ref, table_ref, layer_ref, shares_ref, segments_ref, *others = refs
    head, share, worker = (lax.axis_index(name) for name in ("head", "share", "wg"))

    def run(shared):
        # The first segment stands with the share, so that one wait brings both.
        begin, end, *fields = (shares_ref[share, field] for field in range(SHARE_FIELDS))
        first = Segment(*fields)

        @pl.when(worker == sizes.workers)
        def _load():
            load_segments(
                sizes,
                shared,
                (q_ref, k_ref, v_ref, table_ref, layer_ref),
                segments_ref,
                head=head,
                begin=begin,
                end=end,
                first=first,
            )

        @pl.when(worker < sizes.workers)
        def _work():
            _attend_segments(sizes, shared, segments_ref, others, begin, end, first)

    pl.run_scoped(run, shared_memory(sizes), collective_axes="wg")


def _attend_segments(
    sizes: Sizes,
    shared: Shared,
    segments: Any,
    outputs: list[Any],
    begin: jax.Array,
    end: jax.Array,
    first: Segment,
) -> None:
    """Attend this worker's part of each segment; the first worker writes the results."""
    worker = lax.axis_index("wg")

    def attend(index, carry):
        position, turn, segment = carry
        following = read_segment(segments, jnp.minimum(index + 1, end - 1))

        @pl.when(segment.steps > 0)
        def _attend():
            place = lax.rem(turn, jnp.int32(2))
            plgpu.barrier_wait(shared.queries_full.at[place])
            queries = shared.queries.at[place]
            sums = attend_segment(
                sizes, shared, segment, worker, queries=queries, position=position
            )
            plgpu.barrier_arrive(shared.queries_free.at[place])

            @pl.when(worker == 0)
            def _write():
                _write_results(sizes, shared, segment, _collect(sizes, shared, sums), outputs)

            @pl.when(worker > 0)
            def _hand_over():
                _wait_for_results_read(shared, turn)
                store_sums(sums, shared.results.at[worker - 1], shared.result_sums.at[worker - 1])
                plgpu.barrier_arrive(shared.results_full)

        @pl.when((segment.steps == 0) & (worker == 0))
        def _write_nothing():
            zeros = jnp.full((sizes.head_dim, sizes.columns), 0, jnp.float32)
            _write_output(sizes, segment, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), outputs[1])

        position += steps_of(sizes, segment.steps, worker)
        return position, turn + jnp.minimum(segment.steps, 1), following

    _, turn, _ = lax.fori_loop(begin, end, attend, (jnp.int32(0), jnp.int32(0), first))

    @pl.when(worker > 0)
    def _drain():
        _wait_for_results_read(shared, turn)


def _wait_for_results_read(shared: Shared, turn: jax.Array) -> None:
    """Wait until the first worker has read what this one handed over the turn before."""

    @pl.when(turn > 0)
    def _wait():
        plgpu.barrier_wait(shared.results_free)


def _collect(sizes: Sizes, shared: Shared, sums: Sums) -> Sums:
    """Add the other workers' sums to the first one's."""
    if sizes.workers == 1:
        return sums
    plgpu.barrier_wait(shared.results_full)
    for other in range(sizes.workers - 1):
        theirs = load_sums(shared.results.at[other], shared.result_sums.at[other])
        sums = merge_sums(sums, theirs)
    plgpu.barrier_arrive(shared.results_free)
    return sums


def _write_results(
    sizes: Sizes, shared: Shared, segment: Segment, sums: Sums, outputs: list[Any]
) -> None:
    """Write the output of a whole row, or a piece's sums; of a row's last piece, its output."""
    counters_ref, out_ref, acc_ref, numbers_ref = outputs
    head = lax.axis_index("head")

    @pl.when(segment.pieces == 1)
    def _write_whole():
        _write_output(sizes, segment, _normalize(sums), out_ref)

    @pl.when(segment.pieces > 1)
    def _write_piece():
        place = segment.place + segment.piece
        store_sums(sums, acc_ref.at[place, head], numbers_ref.at[place, head])
        counter = counters_ref.at[segment.row, head]
        arrive(counter, segment.pieces, shared.arrived, interpreted=sizes.interpreted)

        @pl.when(shared.arrived[0] + 1 == segment.pieces)
        def _combine():
            combined = _combine_pieces(segment, sums, acc_ref, numbers_ref)
            _write_output(sizes, segment, _normalize(combined), out_ref)


def _combine_pieces(segment: Segment, sums: Sums, acc_ref: Any, numbers_ref: Any) -> Sums:
    """All pieces' sums in the pieces' order, whoever came last. `sums` only gives the shapes."""
    head = lax.axis_index("head")

    def add_some(index, so_far):
        first = index * COMBINED_AT_ONCE
        pieces = [first + offset for offset in range(COMBINED_AT_ONCE)]
        places = [segment.place + jnp.minimum(piece, segment.pieces - 1) for piece in pieces]
        loaded = [load_sums(acc_ref.at[at, head], numbers_ref.at[at, head]) for at in places]
        for piece, more in zip(pieces, loaded, strict=True):
            highest = jnp.where(piece < segment.pieces, more.highest, MASKED)
            so_far = merge_sums(so_far, more._replace(highest=highest))
        return so_far

    nothing = Sums(sums.acc * 0, sums.highest * 0 + MASKED, sums.total * 0)
    rounds = lax.div(segment.pieces + (COMBINED_AT_ONCE - 1), jnp.int32(COMBINED_AT_ONCE))
    return lax.fori_loop(0, rounds, add_some, nothing)


def _normalize(sums: Sums) -> jax.Array:
    return sums.acc * lax.broadcast_in_dim(1 / sums.total, sums.acc.shape, [1])


def _write_output(sizes: Sizes, segment: Segment, out: jax.Array, out_ref: Any) -> None:
    """Write [H, N] as this head's rows of the output."""
    heads = pl.ds(lax.axis_index("head") * sizes.group, sizes.group)
    target = out_ref.at[segment.row, heads]
    store_columns(out.astype(sizes.dtype), target, interpreted=sizes.interpreted)
