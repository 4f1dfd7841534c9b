"""StoredTensor: a checkpoint's tensor before its values are read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def _keep() -> None:
    """Nothing to give back."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor whose shape and type are known from a header.

    Attributes:
      shape: of the tensor.
      dtype: of what `array` gives.
      array: () -> its values, read-only. A view of the file where values stand as they are: what
        is sliced off is not read. Made anew at each call where they must be decoded.
      release: gives back the memory of the file that was read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    array: Callable[[], np.ndarray]
    release: Callable[[], None] = _keep

    def outline(self) -> np.ndarray:
        """An array of its shape and type without memory, to try out how it is taken apart."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Its values, for numpy's functions."""
        return np.asarray(self.array(), dtype, copy=copy)
