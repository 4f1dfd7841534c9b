"""Where the parts of a head's softmax meet: the threads of a block, its cluster, all clusters."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_inline import arrive
from pallas_kernels.attention.mosaic_attention import LOWEST
from pallas_kernels.attention.one_row_block import Sizes, State
from pallas_kernels.attention.one_row_inline import (
    store_to_leader,
    synchronize,
    synchronize_cluster,
)
from pallas_kernels.fused.mosaic_rows import WARP_LANES, load, over_columns, rows_layout

COMBINED_AT_ONCE = 4  # clusters whose parts are read at the same time


class Part(NamedTuple):
    """Softmax of some query heads over some keys: float32.

    Attributes:
      acc: [heads, stored head dim] weighted values.
      highest: [heads] highest logit.
      total: [heads] weights.
    """

    acc: jax.Array
    highest: jax.Array
    total: jax.Array


class Shared(NamedTuple):
    """Shared memory of a block, float32 but for `arrived`.

    Attributes:
      queries: [G, stored head dim].
      new: [2, stored head dim], key and value of the new token.
      places: [G, rows, stored head dim] and [2, G, rows], the parts of this block.
      blocks: [blocks, G, stored head dim] and [2, blocks, G], in the cluster's first block: the
        parts of all its blocks.
      arrived: [1] int32.
    """

    queries: Any
    new: Any
    places: tuple[Any, Any]
    blocks: tuple[Any, Any]
    arrived: Any


def shared_memory(sizes: Sizes) -> Shared:
    """What to allocate."""
    G, H, rows, blocks = sizes.group, sizes.heads.stored, sizes.rows, sizes.blocks

    def floats(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.float32)

    return Shared(
        queries=floats(G, H),
        new=floats(2, H),
        places=(floats(G, rows, H), floats(2, G, rows)),
        blocks=(floats(blocks, G, H), floats(2, blocks, G)),
        arrived=plgpu.SMEM((1,), jnp.int32),
    )


def meet_in_block(sizes: Sizes, shared: Shared, states: list[State]) -> list[Part]:
    """The parts of this block, one for each chunk of query heads."""
    accs, numbers = shared.places
    for head, state in enumerate(states):
        accs.at[head][...] = state.acc
        numbers.at[0, head][...] = state.highest
        numbers.at[1, head][...] = state.total
    synchronize(interpreted=sizes.interpreted)

    def load_place(chunk, row):
        heads = pl.ds(*chunk)
        return _load(sizes, accs.at[heads, row], *(numbers.at[i, heads, row] for i in (0, 1)))

    return [
        combine([load_place(chunk, row) for row in range(sizes.rows)]) for chunk in sizes.chunks
    ]


def meet_in_cluster(sizes: Sizes, shared: Shared, parts: list[Part]) -> None:
    """Bring the parts of all blocks into the shared memory of the first."""
    accs, numbers = shared.blocks
    block = lax.axis_index("block")
    for chunk, part in zip(sizes.chunks, parts, strict=True):
        heads, layout = pl.ds(*chunk), _layout(sizes, chunk[1])
        by_head = layout.reduce((1,))
        store_to_leader(part.acc, accs.at[block, heads], layout)
        store_to_leader(part.highest, numbers.at[0, block, heads], by_head)
        store_to_leader(part.total, numbers.at[1, block, heads], by_head)
    synchronize_cluster()


def load_cluster(sizes: Sizes, shared: Shared) -> list[Part]:
    """The parts of the cluster, in its first block."""
    accs, numbers = shared.blocks

    def load_block(chunk, block):
        heads = pl.ds(*chunk)
        return _load(sizes, accs.at[block, heads], *(numbers.at[i, block, heads] for i in (0, 1)))

    return [
        combine([load_block(chunk, block) for block in range(sizes.blocks)])
        for chunk in sizes.chunks
    ]


def finish(
    sizes: Sizes,
    shared: Shared,
    parts: list[Part],
    clusters: jax.Array,
    outputs: tuple[Any, Any, Any, Any],
) -> None:
    """Write the output, or a cluster's parts; the last cluster to come writes the output of all.

    Args:
      sizes: static numbers.
      shared: of this block, the first of its cluster.
      parts: of the cluster.
      clusters: that share this row and head.
      outputs: in global memory, of this row and head: the output [G, stored head dim], parts
        [clusters, G, stored head dim] and [2, clusters, G], and the counter.
    """
    out, accs, numbers, counter = outputs
    if sizes.clusters == 1:
        _write(sizes, parts, out)
        return

    @pl.when(clusters == 1)
    def _alone():
        _write(sizes, parts, out)

    @pl.when(clusters > 1)
    def _with_others():
        cluster = lax.axis_index("cluster")
        for chunk, part in zip(sizes.chunks, parts, strict=True):
            heads = pl.ds(*chunk)
            accs.at[cluster, heads][...] = part.acc
            numbers.at[0, cluster, heads][...] = part.highest
            numbers.at[1, cluster, heads][...] = part.total
        arrive(counter, clusters, shared.arrived, interpreted=sizes.interpreted)

        @pl.when(shared.arrived[0] + 1 == clusters)
        def _last():
            combined = [
                _combine_clusters(sizes, chunk, clusters, (accs, numbers)) for chunk in sizes.chunks
            ]
            _write(sizes, combined, out)


def _combine_clusters(
    sizes: Sizes, chunk: tuple[int, int], clusters: jax.Array, refs: tuple[Any, Any]
) -> Part:
    """The clusters' parts in their order, whoever came last."""
    accs, numbers = refs
    heads, layout = pl.ds(*chunk), _layout(sizes, chunk[1])
    at_once = min(COMBINED_AT_ONCE, sizes.clusters)

    def add_some(turn, so_far):
        parts = [so_far]
        for offset in range(at_once):
            number = turn * at_once + offset
            place = jnp.minimum(number, clusters - 1)
            part = _load(
                sizes, accs.at[place, heads], *(numbers.at[i, place, heads] for i in (0, 1))
            )
            highest = jnp.where(number < clusters, part.highest, LOWEST)
            parts.append(part._replace(highest=highest))
        return combine(parts)

    def full(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    by_head = (chunk[1],), layout.reduce((1,))
    nothing = Part(
        full(0, (chunk[1], sizes.heads.stored), layout), full(LOWEST, *by_head), full(0, *by_head)
    )
    turns = lax.div(clusters + (at_once - 1), jnp.int32(at_once))
    return lax.fori_loop(0, turns, add_some, nothing)


def combine(parts: list[Part]) -> Part:
    """Parts of disjoint sets of keys, as one."""
    highest = functools.reduce(jnp.maximum, (part.highest for part in parts))
    weights = [jnp.exp2(part.highest - highest) for part in parts]
    total = functools.reduce(
        jnp.add, (part.total * weight for part, weight in zip(parts, weights, strict=True))
    )
    acc = functools.reduce(
        jnp.add, (_scale(part.acc, weight) for part, weight in zip(parts, weights, strict=True))
    )
    return Part(acc, highest, total)


def _write(sizes: Sizes, parts: list[Part], out: Any) -> None:
    for chunk, part in zip(sizes.chunks, parts, strict=True):
        inverse = jnp.where(part.total > 0, 1 / part.total, 0.0)  # a padding row has no key
        out[pl.ds(*chunk)] = _scale(part.acc, inverse).astype(sizes.heads.dtype)


def _scale(acc: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiply [heads, stored head dim] by [heads]."""
    heads, columns = acc.shape
    return acc * over_columns(factors, columns, rows_layout(heads, columns, WARP_LANES))


def _layout(sizes: Sizes, heads: int) -> Any:
    """Of [heads, stored head dim] where parts meet."""
    return rows_layout(heads, sizes.heads.stored, WARP_LANES)


def _load(sizes: Sizes, acc: Any, highest: Any, total: Any) -> Part:
    layout = _layout(sizes, acc.shape[0])
    return Part(load(acc, layout), *(load(ref, layout.reduce((1,))) for ref in (highest, total)))
