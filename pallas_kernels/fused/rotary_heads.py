"""Heads of a qkv product in registers: bias, RMSNorm, rotary embedding, and the store.

A head lies in pieces, the two halves that rotate and what stays, one head a row. Every kernel that
makes queries or keys of these functions rounds alike, to the bit.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.fused.mosaic_rows import (
    layer_index,
    load,
    load_sum,
    over_columns,
    over_rows,
    round_to,
    rows_layout,
)

LANES = (16, 8)  # threads that may share a head; the first that fits is taken

# The pieces of a head of each row, float32[rows, size of the piece].
Head = list[jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Static numbers of a head.

    Attributes:
      head_dim: H.
      half: of the rotary dim.
      stored: head dim in memory.
      eps: added to the mean square.
      gain_offset: added to the gains in float32.
      dtype: of the model.
    """

    head_dim: int
    half: int
    stored: int
    eps: float
    gain_offset: float
    dtype: DTypeLike

    @classmethod
    def of(
        cls, head_dim: int, cos: jax.Array, pages: jax.Array, *, eps: float, gain_offset: float
    ) -> Self:
        """Of heads of `head_dim` that are turned by `cos` [T, half] and stored in `pages`."""
        return cls(
            head_dim=head_dim,
            half=cos.shape[1],
            stored=pages.shape[-1],
            eps=eps,
            gain_offset=gain_offset,
            dtype=pages.dtype,
        )

    @property
    def lanes(self) -> int:
        """Threads that share a head."""
        lanes = head_lanes(self.head_dim, self.half, self.stored)
        assert lanes is not None
        return lanes

    @property
    def pieces(self) -> tuple[Any, ...]:
        """The rotated halves of a head, and what stays as it is, if anything."""
        half, rest = self.half, self.head_dim - 2 * self.half
        pieces = (pl.ds(0, half), pl.ds(half, half))
        return (*pieces, pl.ds(2 * half, rest)) if rest else pieces

    def layout(self, rows: int, piece: Any) -> Any:
        """Of a piece of `rows` heads."""
        return rows_layout(rows, piece.size, self.lanes)


class RotaryInputs(NamedTuple):
    """References to what heads are made of and where they go.

    Attributes:
      qkv: [..., T, K, G + 2, H], the product.
      bias: [L, K, G + 2, H]; None where there is none.
      gains: [L, H] each, of query and key heads; both None where there are none.
      angles: float32[T, half] each, cosines and sines.
      slots: int32[T], page * B + offset.
      layer: int32[1], of bias and gains.
      cache_layer: int32[1], of the pages.
    """

    qkv: Any
    bias: Any
    gains: tuple[Any, Any]
    angles: tuple[Any, Any]
    slots: Any
    layer: Any
    cache_layer: Any

    @classmethod
    def take(
        cls, refs: tuple[Any, ...], *, has_bias: bool, has_gains: bool
    ) -> tuple[Self, list[Any]]:
        """The first of a kernel's references, and the others.

        Args:
          refs: qkv, bias and gains where present, cosines, sines, slots, layers, and more.
          has_bias: whether there is a bias.
          has_gains: whether there are gains.
        """
        qkv, *others = refs
        bias = others.pop(0) if has_bias else None
        gains = (others.pop(0), others.pop(0)) if has_gains else (None, None)
        cos, sin, slots, layer, cache_layer, *others = others
        return cls(qkv, bias, gains, (cos, sin), slots, layer, cache_layer), others

    def layer_index(self) -> jax.Array | None:
        """Which bias and gains to read; None where there are neither."""
        stacked = self.gains[0] if self.bias is None else self.bias
        return None if stacked is None else layer_index(self.layer, stacked)


def head_lanes(head_dim: int, half: int, stored: int) -> int | None:
    """Threads that share a head: each piece of it must be a multiple; None where none fits."""
    pieces = (half, head_dim - 2 * half, stored - head_dim)
    if half <= 0 or min(pieces) < 0:
        return None
    return next((n for n in LANES if all(piece % n == 0 for piece in pieces)), None)


def load_heads(sizes: HeadSizes, ref: Any, index: tuple[Any, ...], rows: int) -> Head:
    """Heads of the qkv product, one a row."""
    return [
        load_sum(ref, (*index, piece), sizes.layout(rows, piece), sizes.dtype)
        for piece in sizes.pieces
    ]


def load_bias(sizes: HeadSizes, ref: Any, index: tuple[Any, ...], rows: int) -> Head | None:
    """The bias of the same heads, or of one that all rows share; None where there is none."""
    if ref is None:
        return None
    return [_load_piece(sizes, ref, index, rows, piece) for piece in sizes.pieces]


def load_gains(sizes: HeadSizes, ref: Any, layer: Any, rows: int) -> Head | None:
    """Gains of the norm [L, H], which all rows share; None where there are none."""
    if ref is None:
        return None
    return [
        _load_piece(sizes, ref, (layer,), rows, piece) + sizes.gain_offset for piece in sizes.pieces
    ]


def load_angles(sizes: HeadSizes, refs: tuple[Any, Any], tokens: Any, rows: int) -> list[jax.Array]:
    """Cosines and sines [T, half] of the tokens in the rows, or of one that all rows share."""
    half = sizes.pieces[0]
    return [_load_piece(sizes, ref, (tokens,), rows, half) for ref in refs]


def _load_piece(
    sizes: HeadSizes, ref: Any, index: tuple[Any, ...], rows: int, piece: Any
) -> jax.Array:
    """float32[rows, size of the piece]; the same in all rows where the index names but one."""
    layout, source = sizes.layout(rows, piece), ref.at[(*index, piece)]
    if len(source.shape) == 2:
        return load(source, layout)
    return over_rows(load(source, layout.reduce((0,))), rows, layout)


def add_bias(sizes: HeadSizes, head: Head, bias: Head | None) -> Head:
    """The sum, rounded to the model dtype."""
    if bias is None:
        return head
    return [round_to(x + b, sizes.dtype) for x, b in zip(head, bias, strict=True)]


def normalise(sizes: HeadSizes, head: Head, gains: Head | None) -> Head:
    """RMSNorm over the head, whose pieces lie in the same rows."""
    if gains is None:
        return head
    total = functools.reduce(jnp.add, (jnp.sum(x * x, axis=1) for x in head))
    scale = lax.rsqrt(total / sizes.head_dim + sizes.eps)
    rows = scale.shape[0]
    return [
        round_to(x * over_columns(scale, piece.size, sizes.layout(rows, piece)) * gain, sizes.dtype)
        for x, piece, gain in zip(head, sizes.pieces, gains, strict=True)
    ]


def rotate(head: Head, angles: list[jax.Array]) -> Head:
    """Turn the two halves; the rest stays."""
    (a, b, *rest), (cos, sin) = head, angles
    return [a * cos - b * sin, b * cos + a * sin, *rest]


def round_head(sizes: HeadSizes, head: Head) -> Head:
    """As stored in the model dtype, and float32 again."""
    return [round_to(x, sizes.dtype) for x in head]


def store_head(sizes: HeadSizes, ref: Any, index: tuple[Any, ...], head: Head) -> None:
    """Write a head of each row in the dtype of `ref`, and zeros up to the stored head dim."""
    rows = head[0].shape[0]
    for x, piece in zip(head, sizes.pieces, strict=True):
        ref[(*index, piece)] = x.astype(ref.dtype)
    if missing := sizes.stored - sizes.head_dim:
        piece = pl.ds(sizes.head_dim, missing)
        zeros = plgpu.layout_cast(jnp.zeros((rows, missing), ref.dtype), sizes.layout(rows, piece))
        ref[(*index, piece)] = zeros
