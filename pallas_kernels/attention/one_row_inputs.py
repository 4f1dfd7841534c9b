"""What a thread block of the one-row kernel reads of the qkv product, and what it makes of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.one_row_block import Sizes, Span
from pallas_kernels.fused.mosaic_rows import divide
from pallas_kernels.fused.rotary_heads import (
    Head,
    RotaryInputs,
    add_bias,
    load_angles,
    load_bias,
    load_gains,
    load_heads,
    normalise,
    rotate,
    round_head,
    store_head,
)


class Inputs(NamedTuple):
    """References to the inputs: of the heads, then page table, lengths, keys and values."""

    rotary: RotaryInputs
    table: Any
    lens: Any
    pages: tuple[Any, Any]


class Share(NamedTuple):
    """What a block attends: row, KV head, its first tile, layer of the cache, the row's span."""

    row: jax.Array
    head: jax.Array
    number: jax.Array
    cache_layer: jax.Array
    span: Span


class Loaded(NamedTuple):
    """Heads of the qkv product with their bias, gains of their norm, cosines and sines."""

    heads: list[Head]
    gains: Head | None
    angles: list[jax.Array]


def load_query_heads(sizes: Sizes, inputs: Inputs, row, head, chunk: tuple[int, int]) -> Loaded:
    """Some query heads, one a row."""
    place, count = (head, pl.ds(*chunk)), chunk[1]
    return Loaded(
        [_load_biased(sizes, inputs, row, place, count)],
        load_gains(sizes.heads, inputs.rotary.gains[0], inputs.rotary.layer_index(), count),
        load_angles(sizes.heads, inputs.rotary.angles, row, count),
    )


def load_new(sizes: Sizes, inputs: Inputs, row: jax.Array, head: jax.Array) -> Loaded:
    """The new key and value, in one row each."""
    places = [(pl.ds(head, 1), sizes.group + kind) for kind in range(2)]
    return Loaded(
        [_load_biased(sizes, inputs, row, place, 1) for place in places],
        load_gains(sizes.heads, inputs.rotary.gains[1], inputs.rotary.layer_index(), 1),
        load_angles(sizes.heads, inputs.rotary.angles, row, 1),
    )


def nothing_new(sizes: Sizes, inputs: Inputs) -> Loaded:
    """In the place of `load_new` where another block does that."""

    def zeros(pieces):
        return [
            plgpu.layout_cast(jnp.zeros((1, piece.size), jnp.float32), sizes.heads.layout(1, piece))
            for piece in pieces
        ]

    pieces = sizes.heads.pieces
    gains = None if inputs.rotary.gains[1] is None else zeros(pieces)
    return Loaded([zeros(pieces) for _ in range(2)], gains, zeros(pieces[:1] * 2))


def make_queries(sizes: Sizes, shared: Any, loaded: list[Loaded]) -> None:
    """Normalise and rotate query heads, and store them in `shared` [G, stored head dim]."""
    for (start, count), (heads, gains, angles) in zip(sizes.chunks, loaded, strict=True):
        made = rotate(normalise(sizes.heads, heads[0], gains), angles)
        store_head(sizes.heads, shared, (pl.ds(start, count),), round_head(sizes.heads, made))


def _load_biased(
    sizes: Sizes, inputs: Inputs, row: jax.Array, place: tuple[Any, Any], rows: int
) -> Head:
    head = load_heads(sizes.heads, inputs.rotary.qkv, (row, *place), rows)
    bias = load_bias(sizes.heads, inputs.rotary.bias, (inputs.rotary.layer_index(), *place), rows)
    return add_bias(sizes.heads, head, bias)


def write_key_and_value(
    sizes: Sizes, inputs: Inputs, shared: Any, share: Share, new: Loaded
) -> None:
    """Write the new token's key and value to their page, and to `shared` [2, stored head dim]."""
    slot = divide(inputs.rotary.slots[share.row], sizes.page_size)
    place = (share.cache_layer, *slot, pl.ds(share.head, 1))
    key, value = new.heads
    key = rotate(normalise(sizes.heads, key, new.gains), new.angles)
    for kind, x in enumerate((key, value)):
        store_head(sizes.heads, inputs.pages[kind], place, x)
        store_head(sizes.heads, shared, (pl.ds(kind, 1),), round_head(sizes.heads, x))
