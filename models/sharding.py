"""Logical axis names of parameters and cache, and the mesh axes they are split over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "model")

MESH_AXIS_OF: dict[str, str | None] = {
    "vocab": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    "head_dim": None,
    "group": None,
    "gate_up": None,
    "layers": None,
    "pages": None,
    "page": None,
}
"""Logical axis -> mesh axis. Query heads follow their KV head: fused weights keep an own axis."""


def make_mesh(tensor_parallel_size: int = 1) -> Mesh:
    """A mesh of `data` = 1 by `model` devices.

    Raises:
      ValueError: fewer devices than asked for.
    """
    devices = jax.devices()[:tensor_parallel_size]
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size must be at most the number of devices, {len(devices)}; "
            f"got {tensor_parallel_size}"
        )
    return jax.make_mesh(
        (1, tensor_parallel_size),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )


@dataclass(frozen=True)
class Sharder:
    """Places arrays by the names of their axes.

    Attributes:
      mesh: the devices; with one device arrays get a plain placement, since that is cheaper.
    """

    mesh: Mesh

    def sharding(self, axes: Sequence[str | None]) -> jax.sharding.Sharding:
        """The sharding of an array whose axes have these logical names."""
        if self.mesh.size == 1:
            return jax.sharding.SingleDeviceSharding(self.mesh.devices.flat[0])
        names = [None if axis is None else MESH_AXIS_OF[axis] for axis in axes]
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def abstract(
        self, shape: Sequence[int], dtype: str | jnp.dtype, axes: Sequence[str | None]
    ) -> jax.ShapeDtypeStruct:
        """The array's shape, dtype and sharding, without the array.

        Raises:
          ValueError: an axis that is split does not divide over the devices.
        """
        for size, axis in zip(shape, axes, strict=True):
            is_split = axis is not None and MESH_AXIS_OF[axis] is not None
            if is_split and size % self.mesh.size:
                raise ValueError(
                    f"tensor_parallel_size must divide the model's {axis} = {size}; "
                    f"got {self.mesh.size}"
                )
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=self.sharding(axes))

    def replicated(self, shape: Sequence[int], dtype: str | jnp.dtype) -> jax.ShapeDtypeStruct:
        """An abstract array that every device holds whole."""
        return self.abstract(shape, dtype, (None,) * len(shape))

    def zeros(self, abstract: Any) -> Any:
        """Allocate zeros for a tree of shapes, each device only its own part."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

        def make():
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)

        return jax.jit(make, out_shardings=shardings)()

    def put(self, value, axes: Sequence[str | None] = ()) -> jax.Array:
        """Upload one host array."""
        axes = axes or (None,) * getattr(value, "ndim", 0)
        return jax.device_put(value, self.sharding(axes))
