"""Rotary embedding, the write of K and V, and paged attention of few decode rows in one kernel.

Of one row, each of these is shorter than the launch of a kernel. Every thread block makes the
queries of its KV head while its share of the row's pages is on the way; the first also makes the
new key and value, writes them to their page and attends them from shared memory, so that nobody
waits for the write. A cluster's blocks meet in shared memory; a long context is shared by several
clusters, whose parts meet in global memory.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.attention.decode_plan import zero_counters
from pallas_kernels.attention.mosaic_attention import PAGE_SIZES, STORED_HEAD_DIMS
from pallas_kernels.attention.one_row_block import Sizes
from pallas_kernels.attention.one_row_kernel import run_block
from pallas_kernels.attention.one_row_meeting import shared_memory
from pallas_kernels.cacheable_kernels import make_kernels_cacheable
from pallas_kernels.fused.fused_inputs import check_rotary_inputs, check_shape
from pallas_kernels.fused.mosaic_rows import COMPILER_PARAMS, check_model_dtype, interpret_option
from pallas_kernels.fused.rotary_heads import HeadSizes, head_lanes

make_kernels_cacheable()

MAX_GROUP = 8
"""Query heads a KV head: their sums stay in registers."""
MAX_GROUP_NUMBERS = 1024
"""Query heads times their stored head dim, Hs. With tiles of TILE keys, a thread has registers for
16 numbers of query and sum and Hs / 32 logits a head, and Hs / 2 for the tiles ahead. So counted, 8
heads of 128 or 4 of 256 take 224 of its 255, and 8 of 256 more than there are."""
TILE_TOKENS = (16, 32, 64)
TILE = 32  # of 8 query heads and two tiles ahead, the most that registers hold
MAX_CLUSTER_BLOCKS = 8  # that every GPU with clusters takes
LONE_ROUNDS = 2  # tiles a block up to which meeting one more cluster costs more than it gains


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRowTuning:
    """How a row's context is shared out.

    Attributes:
      tile_tokens: keys that a thread block loads at a time.
      cluster_blocks: thread blocks that meet in shared memory; 1 = none do.
      clusters: of one KV head of one row, at most.
      lone_rounds: tiles a block that the working clusters must have before another one joins.
    """

    tile_tokens: int
    cluster_blocks: int
    clusters: int
    lone_rounds: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot share out."""
        if self.tile_tokens not in TILE_TOKENS:
            raise ValueError(f"tile_tokens must be one of {TILE_TOKENS}; got {self.tile_tokens}")
        if not 1 <= self.cluster_blocks <= MAX_CLUSTER_BLOCKS:
            raise ValueError(
                f"cluster_blocks must be 1 to {MAX_CLUSTER_BLOCKS}; got {self.cluster_blocks}"
            )
        if self.clusters < 1 or self.lone_rounds < 1:
            raise ValueError(
                "clusters and lone_rounds must be at least 1; got "
                f"{self.clusters} and {self.lone_rounds}"
            )


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_kv_heads", "head_dim", "scale", "eps", "gain_offset", "sliding_window", "soft_cap",
        "interpret", "tuning",
    ),
)  # fmt: skip
def rotary_decode(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    cache_layer: jax.Array,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    bias: jax.Array | None = None,
    q_gains: jax.Array | None = None,
    k_gains: jax.Array | None = None,
    eps: float = 0.0,
    gain_offset: float = 0.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: Any = None,
    tuning: OneRowTuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `rotary_write`, then `decode_attention` of what it made: token i is row i's newest.

    Args:
      qkv: [S, K * (G + 2) * H] or float32[P, S, K * (G + 2) * H], as `rotary_write` takes it.
      k_pages: [Lg, P, B, K, Hs] bfloat16 or float16; B is 16, 32, 64 or 128, Hs 64, 128 or 256.
        Donate it: it is updated in place. Page 0 is the null page, which no sequence owns.
      v_pages: as k_pages.
      layer: int32[1], which bias and gains to read.
      cache_layer: int32[1], which layer of the pages to write and to read.
      slots: int32[S], page * B + offset of each row's last token; in page 0 for a padding row, and
        for one that has nothing to compute, whose output means nothing.
      cos: float32[S, rotary_dim / 2], cosines of the positions.
      sin: as cos.
      page_table: [S, M] int32; entries past a sequence's end, and those before its window, may
        hold anything.
      seq_lens: [S] int32, tokens in cache, this step's included; 0 = padding row.
      num_kv_heads: K.
      head_dim: H.
      scale: multiplies the logits.
      bias: [L, K * (G + 2) * H] in the model dtype, of all layers.
      q_gains: [L, H]; each query head is normalised by them before it is rotated.
      k_gains: [L, H]; the same of the key heads. Both or none.
      eps: added to the mean square.
      gain_offset: added to the gains in float32.
      sliding_window: the query sees this many keys, its own included; None = all.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU, without clusters: what
        they share would be blocks of their own there.
      tuning: None = chosen by the shape.

    Returns:
      [S, K * G, Hs] in the model dtype, zeros for padding rows, and the pages after the write.

    Raises:
      ValueError: shapes or dtypes do not fit, or `fits_rotary_decode` says no.

    Source: as `decode_attention`; NVIDIA Hopper's thread block clusters.
    """
    check_model_dtype("pages", k_pages.dtype)
    group = check_rotary_inputs(
        qkv, k_pages, v_pages, slots, (cos, sin), bias, (q_gains, k_gains), num_kv_heads, head_dim
    )
    num_rows = slots.shape[0]
    check_shape("page_table", page_table, (num_rows, None))
    check_shape("seq_lens", seq_lens, (num_rows,))
    page_size, stored = k_pages.shape[2], k_pages.shape[4]
    rotary_dim = 2 * cos.shape[1]
    if not fits_rotary_decode(group, head_dim, rotary_dim, stored, page_size, k_pages.dtype):
        raise ValueError(
            f"rotary_decode takes no {group} query heads a KV head of {head_dim}, rotary dim "
            f"{rotary_dim}, stored as {stored} in pages of {page_size}; use rotary_write and "
            "decode_attention"
        )
    max_tokens = page_table.shape[1] * page_size
    tuning = tuning or choose_one_row_tuning(num_rows, num_kv_heads, max_tokens)
    blocks = tuning.cluster_blocks if interpret is None else 1
    sizes = Sizes(
        heads=HeadSizes.of(head_dim, cos, k_pages, eps=eps, gain_offset=gain_offset),
        kv_heads=num_kv_heads,
        group=group,
        page_size=page_size,
        table_width=page_table.shape[1],
        tile=tuning.tile_tokens,
        clusters=tuning.clusters * tuning.cluster_blocks // blocks,
        blocks=blocks,
        lone_rounds=tuning.lone_rounds,
        scale=scale,
        window=sliding_window,
        soft_cap=soft_cap,
        interpreted=interpret is not None,
    )
    weights = (bias, q_gains, k_gains)
    others = (cos, sin, slots, layer, cache_layer, page_table, seq_lens)
    return _launch(sizes, qkv, weights, others, (k_pages, v_pages), interpret)


def fits_rotary_decode(
    group: int, head_dim: int, rotary_dim: int, stored: int, page_size: int, dtype: DTypeLike
) -> bool:
    """Whether the kernel takes heads and pages of these sizes."""
    return (
        group <= MAX_GROUP
        and group * stored <= MAX_GROUP_NUMBERS
        and stored in STORED_HEAD_DIMS
        and page_size in PAGE_SIZES
        and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        and head_lanes(head_dim, rotary_dim // 2, stored) is not None
    )


def choose_one_row_tuning(num_rows: int, num_kv_heads: int, max_tokens: int) -> OneRowTuning:
    """Two blocks a multiprocessor at the longest context, as far as it has rounds for them.

    No row of at most `max_tokens` lets more clusters work than have LONE_ROUNDS tiles a block.
    """
    useful = -(-max_tokens // (TILE * MAX_CLUSTER_BLOCKS * LONE_ROUNDS))
    filling = 256 // (num_rows * num_kv_heads * MAX_CLUSTER_BLOCKS)
    return OneRowTuning(
        tile_tokens=TILE,
        cluster_blocks=MAX_CLUSTER_BLOCKS,
        clusters=max(1, min(useful, filling)),
        lone_rounds=LONE_ROUNDS,
    )


def _launch(sizes: Sizes, qkv, weights, others, pages, interpret: Any):
    """Run the kernel on the pages as they stand; two outputs are where clusters meet."""
    K, G, stored = sizes.kv_heads, sizes.group, sizes.heads.stored
    num_rows, dtype = qkv.shape[-2], sizes.heads.dtype
    head_shape = (K, G + 2, sizes.heads.head_dim)
    bias, q_gains, k_gains = weights
    present = (bias is not None, q_gains is not None)
    if bias is not None:
        bias = bias.reshape(-1, *head_shape)
    arrays = [array for array in (bias, q_gains, k_gains) if array is not None]
    page_refs = [jax.new_ref(array) for array in pages]
    clusters = (num_rows, K, sizes.clusters)
    in_clusters = {"cluster": (sizes.blocks,), "cluster_names": ("block",)}
    run = plgpu.kernel(
        functools.partial(run_block, sizes, present),
        out_type=[
            jax.ShapeDtypeStruct((num_rows, K, G, stored), dtype),
            jax.ShapeDtypeStruct((*clusters, G, stored), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, K, 2, sizes.clusters, G), jnp.float32),
        ],
        grid=clusters,
        grid_names=("row", "head", "cluster"),
        compiler_params=COMPILER_PARAMS,
        scratch_types=[shared_memory(sizes)],
        **(in_clusters if sizes.blocks > 1 else {}),
        **interpret_option(interpret),
    )
    counters = zero_counters(others[-1], K)
    qkv = qkv.reshape(*qkv.shape[:-1], *head_shape)
    out, _, _ = run(qkv, *arrays, *others, counters, *page_refs)
    k_pages, v_pages = (jax.freeze(ref) for ref in page_refs)
    return out.reshape(num_rows, K * G, stored), k_pages, v_pages
