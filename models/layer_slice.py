"""LayerSlice: one layer's part of a stacked parameter, which kernels read in place."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerSlice:
    """A parameter that is kept with those of other layers in one array, not yet cut out.

    Stands where the parameter would; `[...]` cuts it out.

    Attributes:
      stack: [L, *shape].
      layer: int32[1], which one.
    """

    stack: jax.Array
    layer: jax.Array

    @classmethod
    def of_layer(cls, stack: jax.Array, layer: int) -> "LayerSlice":
        """The slice of a layer that is known while tracing."""
        return cls(stack, jnp.asarray(np.array([layer], np.int32)))

    @classmethod
    def of(cls, parameter: "jax.Array | LayerSlice") -> "LayerSlice":
        """A parameter as a slice; one with an array of its own is a stack of one."""
        if isinstance(parameter, LayerSlice):
            return parameter
        return cls.of_layer(parameter[None], 0)

    def __getitem__(self, index: Any) -> jax.Array:
        return lax.dynamic_index_in_dim(self.stack, self.layer[0], keepdims=False)[index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.stack.shape[1:]

    @property
    def num_bytes(self) -> int:
        """Of the parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    def matrices(self, num_in_dims: int = 1) -> jax.Array:
        """The stack of a weight [*in_dims, *out_dims] as [L, K, N]."""
        in_size = math.prod(self.shape[:num_in_dims])
        return self.stack.reshape(self.stack.shape[0], in_size, -1)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the parameter."""
        return self.stack.dtype
