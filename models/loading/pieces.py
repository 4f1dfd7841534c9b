"""ParameterPieces: a parameter as views of stored tensors, of which any part can be made."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.loading.tiled_copy import copy_tiled

Index = tuple[slice, ...]
ALIGNMENT = 64
"""Bytes; JAX takes a host array that is aligned so for the CPU's own, without a copy."""
HUGE_BYTES = 1 << 22
"""From here on numpy asks for huge pages, which took three times as long to fill as others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a parameter.

    Attributes:
      start: where its first element stands in the parameter.
      values: a view, with the parameter's axes.
    """

    start: tuple[int, ...]
    values: np.ndarray


def whole(values: np.ndarray) -> tuple[Piece, ...]:
    """The parameter as it is stored."""
    return (Piece((0,) * values.ndim, values),)


class ParameterPieces:
    """A parameter that is read by slice.

    Attributes:
      shape: of the whole parameter.
    """

    def __init__(self, pieces: Sequence[Piece]):
        """Fit the pieces together.

        Args:
          pieces: blocks that do not overlap.

        Raises:
          ValueError: they leave gaps.
        """
        self._pieces = pieces
        ends = [np.add(piece.start, piece.values.shape) for piece in pieces]
        self.shape = tuple(int(size) for size in np.max(ends, axis=0))
        if sum(piece.values.size for piece in pieces) != math.prod(self.shape):
            shapes = ", ".join(str(piece.values.shape) for piece in pieces[:4])
            raise ValueError(f"the parts must fit each other; got {shapes}")

    def read(self, index: Index, dtype: np.dtype) -> np.ndarray:
        """A new array of the parameter's part at `index`; only that part is read.

        Args:
          index: slices of step 1, one an axis.
          dtype: of the result.
        """
        bounds = [s.indices(size)[:2] for s, size in zip(index, self.shape, strict=True)]
        out = _aligned_empty([end - begin for begin, end in bounds], dtype)
        for piece in self._pieces:
            spans = [
                (max(begin, start), min(end, start + size))
                for (begin, end), start, size in zip(
                    bounds, piece.start, piece.values.shape, strict=True
                )
            ]
            if all(low < high for low, high in spans):
                target = _shifted(spans, [begin for begin, _ in bounds])
                copy_tiled(out[target], piece.values[_shifted(spans, piece.start)])
        return out


def _shifted(spans: Sequence[tuple[int, int]], origin: Sequence[int]) -> Index:
    return tuple(slice(low - o, high - o) for (low, high), o in zip(spans, origin, strict=True))


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= HUGE_BYTES:
        return np.frombuffer(_private_memory(num_bytes), dtype).reshape(shape)
    data = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -data.ctypes.data % ALIGNMENT
    return data[begin : begin + num_bytes].view(dtype).reshape(shape)


def _private_memory(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
