"""Paged decode attention in Pallas Mosaic GPU (Hopper): one new query a row."""

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
    Sums,
    attend_block,
    check_mosaic_inputs,
    drain_ring,
    empty_sums,
    load_blocks,
    ring_scratch,
)
from pallas_kernels.paged_inputs import check_paged_inputs
from pallas_kernels.platform import gpu_kind
from pallas_kernels.tuning import DecodeTuningConfig, decode_tuning


@functools.partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "soft_cap", "split_tokens", "interpret", "tuning"),
)
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
    interpret: Any = None,
    tuning: DecodeTuningConfig | None = None,
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
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      [S, N, H] in q's dtype; padding rows are zero.

    Raises:
      ValueError: shapes, dtypes, head dim, page size, heads or `split_tokens` do not fit.

    Source: Kwon et al. 2023 (paged attention); Milakov and Gimelshein 2018 (online softmax);
    Dao et al. 2023 (Flash-Decoding, splits of the context).
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    check_mosaic_inputs(q, k_pages)
    tuning = tuning or decode_tuning(gpu_kind(), q.shape[2], q.dtype)
    splits = _choose_splits(q, k_pages, page_table, split_tokens, tuning)
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
    inputs = (k_pages, v_pages, page_table, seq_lens, layer)
    out = _launch(plan, splits, tuning, q, inputs, interpret)
    if splits.number == 1:
        return out[0]
    return _combine_splits(out[0], out[1], out[2], plan, q)


class _Splits(NamedTuple):
    """How the contexts are cut: into `number`, each of `blocks` or (None) of an equal share."""

    number: int
    blocks: int | None


def _choose_splits(
    q: jax.Array,
    k_pages: jax.Array,
    page_table: jax.Array,
    split_tokens: int | None,
    tuning: DecodeTuningConfig,
) -> _Splits:
    """Fill the processors when the rows alone do not, or follow `split_tokens`."""
    max_tokens = page_table.shape[1] * k_pages.shape[2]
    if split_tokens is None:
        fill = tuning.num_processors // (q.shape[0] * k_pages.shape[3])
        return _Splits(max(1, min(fill, max_tokens // tuning.min_split_tokens)), None)
    if split_tokens < 1 or split_tokens % tuning.block_tokens:
        raise ValueError(
            f"split_tokens must be a positive multiple of {tuning.block_tokens}; got {split_tokens}"
        )
    return _Splits(max(1, -(-max_tokens // split_tokens)), split_tokens // tuning.block_tokens)


def _combine_splits(
    out: jax.Array, highest: jax.Array, total: jax.Array, plan: BlockPlan, q: jax.Array
) -> jax.Array:
    """Sum the splits: out [S, splits, N, H], highest and total [S, splits, K, 64], float32."""
    num_rows, _, num_heads, _ = out.shape
    highest, total = highest[..., : plan.group], total[..., : plan.group]
    weight = jnp.exp2(highest - highest.max(1, keepdims=True))
    total = jnp.maximum((total * weight).sum(1), 1e-30)  # 0 for a padding row: out is 0
    out = (out * weight.reshape(num_rows, -1, num_heads, 1)).sum(1)
    return (out / total.reshape(num_rows, num_heads, 1)).astype(q.dtype)


def _launch(plan, splits: _Splits, tuning: DecodeTuningConfig, q: jax.Array, inputs, interpret):
    """Run the kernel: [out] for one split, else [out, highest, total] in float32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = inputs[0].shape[3]
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if splits.number > 1:
        partial = jax.ShapeDtypeStruct((num_rows, splits.number, num_heads, head_dim), jnp.float32)
        sums = jax.ShapeDtypeStruct((num_rows, splits.number, num_kv_heads, TILE_ROWS), jnp.float32)
        out_type = [partial, sums, sums]
    grid = {"head": num_kv_heads, "row": num_rows, "split": splits.number}
    if tuning.heads_together:  # the last axis runs fastest
        grid = {name: grid[name] for name in ("row", "split", "head")}
    rows, rows_a_group = _flat_queries(q, num_kv_heads)
    run = plgpu.kernel(
        functools.partial(_kernel, plan, splits, num_kv_heads, rows_a_group),
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=2,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(rows, *inputs)


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


def _kernel(plan: BlockPlan, splits: _Splits, num_kv_heads: int, rows_a_group: int, *refs: Any):
    """Allocate shared memory and barriers, then run the two warpgroups."""
    q_ref, k_ref, v_ref, table_ref, len_ref, layer_ref, *out_refs = refs
    head, row = lax.axis_index("head"), lax.axis_index("row")
    whole = splits.number == 1

    def run(ring, scratch, queries_full):
        seq_len = len_ref[row]
        start, first, steps = _share(plan, splits, seq_len)

        @pl.when(lax.axis_index("wg") == 0)
        def _compute():
            source = q_ref.at[
                pl.ds((row * num_kv_heads + head) * rows_a_group, -(-plan.group // 8) * 8)
            ]
            _fetch_queries(plan, source, scratch["queries"], queries_full, steps)
            sums = _attend(plan, ring, scratch, start, first, steps, seq_len)
            _write(plan, scratch, sums, out_refs)

        @pl.when(lax.axis_index("wg") == 1)
        def _load():
            load_blocks(
                plan,
                ring,
                (k_ref, v_ref, table_ref, layer_ref),
                row=row,
                kv_head=head,
                first_block=first,
                steps=steps,
                keys=(start, seq_len),
            )
            drain_ring(plan, ring, steps)

    sums = None if whole else plgpu.SMEM((TILE_ROWS,), jnp.float32)
    weights = plgpu.SMEM((TILE_ROWS, plan.block), plan.dtype, transforms=TILED)
    scratch = {
        "queries": plgpu.SMEM((TILE_ROWS, plan.head_dim), plan.dtype, transforms=TILED),
        "weights": weights if plan.p_in_smem else None,
        "out": plgpu.SMEM((TILE_ROWS, plan.head_dim), plan.dtype if whole else jnp.float32),
        "highest": sums,
        "total": sums,
    }
    pl.run_scoped(run, ring_scratch(plan, 1), scratch, plgpu.Barrier(), collective_axes="wg")


def _share(plan: BlockPlan, splits: _Splits, seq_len: jax.Array):
    """First visible key of the row, first block and number of blocks of this program."""
    block = jnp.int32(plan.block)
    split = lax.axis_index("split")
    start = jnp.int32(0) if plan.window is None else jnp.maximum(seq_len - plan.window, 0)
    first, end = lax.div(start, block), lax.div(seq_len + (block - 1), block)
    if splits.blocks is None:
        share = lax.div(end - first + (splits.number - 1), jnp.int32(splits.number))
        first = first + split * share
        end = jnp.minimum(first + share, end)
    else:
        first = jnp.maximum(split * splits.blocks, first)
        end = jnp.minimum((split + 1) * splits.blocks, end)
    return start, first, jnp.maximum(end - first, 0)


def _fetch_queries(plan: BlockPlan, source: Any, queries: Any, full: Any, steps: jax.Array) -> None:
    @pl.when(steps > 0)
    def _fetch():
        plgpu.copy_gmem_to_smem(source, queries.at[pl.ds(0, source.shape[0])], full)
        plgpu.barrier_wait(full)


def _attend(plan: BlockPlan, ring, scratch, start, first, steps, seq_len) -> Sums:
    """Online softmax over the blocks `[first, first + steps)` of the row."""
    block = jnp.int32(plan.block)

    def attend(is_edge: bool, step, sums):
        offset = (first + step) * block

        def visible(_, column):
            seen = column < seq_len - offset
            return seen if plan.window is None else seen & (column >= start - offset)

        return attend_block(
            plan,
            ring,
            lax.rem(step, jnp.int32(plan.stages)),
            scratch["queries"],
            scratch["weights"],
            sums,
            visible=visible if is_edge else None,
            keys=(start - offset, seq_len - offset) if is_edge else None,
        )

    # Blocks [0, inner) hold keys before the window, [inner, outer) only visible keys.
    inner, sums = jnp.int32(0), empty_sums(plan)
    if plan.window is not None:
        inner = jnp.clip(lax.div(start + (block - 1), block) - first, 0, steps)
        sums = lax.fori_loop(0, inner, functools.partial(attend, True), sums)
    outer = jnp.clip(lax.div(seq_len, block) - first, inner, steps)
    sums = lax.fori_loop(inner, outer, functools.partial(attend, False), sums)
    return lax.fori_loop(outer, steps, functools.partial(attend, True), sums)


def _write(plan: BlockPlan, scratch: dict[str, Any], sums: Sums, out_refs: list[Any]) -> None:
    """Write the output, or the sums of this split, to global memory."""
    head, row, split = (lax.axis_index(name) for name in ("head", "row", "split"))
    acc, highest, total = sums
    staged = scratch["out"].at[pl.ds(0, plan.group)]
    heads = pl.ds(head * plan.group, plan.group)
    if len(out_refs) == 1:
        inverse = 1 / jnp.maximum(total, 1e-30)  # of a padding row, whose acc is 0, too
        acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
        scratch["out"][...] = acc.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out_refs[0].at[row, heads])
    else:
        scratch["out"][...] = acc
        scratch["highest"][...] = highest
        scratch["total"][...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out_refs[0].at[row, split, heads])
        plgpu.copy_smem_to_gmem(scratch["highest"], out_refs[1].at[row, split, head])
        plgpu.copy_smem_to_gmem(scratch["total"], out_refs[2].at[row, split, head])
    plgpu.wait_smem_to_gmem(0)
