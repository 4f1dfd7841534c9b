"""WeightLayout: how a model's parameters become the flat leaves that a step takes, and back.

A call of a compiled program costs time for each leaf (measured: docs/performance.md), so the
parameters that all layers have in equal shape can be kept as one stacked array each. The model
code hardly knows: inside the trace each layer gets a LayerSlice.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.decoder import Decoder
from models.layer_slice import LayerSlice
from models.loading.pieces import Index, ParameterPieces
from models.sharding import Sharder, compile_zeros

Stack = Literal["none", "vectors", "all"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array that enters a step.

    Attributes:
      path: of the parameter, with `layers.*` for a stack.
      shape: of the array, the stacked axis first.
      dtype: its name.
      axes: logical names of the axes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


class WeightLayout:
    """The leaves of one model, their order, and the way back to a model inside a trace.

    Attributes:
      leaves: the arrays that enter a step.
      head_index: the leaf `[V, D]` that gives the logits.
      logit_soft_cap: what `compute_logits` needs beside it.
    """

    def __init__(
        self,
        graphdef,
        treedef,
        parameters: list[Leaf],
        *,
        head_path: str,
        stack: Stack,
        logit_soft_cap: float | None,
    ):
        self._graphdef, self._treedef = graphdef, treedef
        self._parameters = parameters
        self.leaves = self._pack_leaves(stack)
        self._leaf_index = {leaf.path: index for index, leaf in enumerate(self.leaves)}
        self.head_index = self._leaf_index[head_path]
        self.logit_soft_cap = logit_soft_cap

    @classmethod
    def of_model(
        cls, model_class: type[Decoder], config: ModelConfig, *, stack: Stack, **options
    ) -> "WeightLayout":
        """The layout of a model that is built without memory.

        Args:
          model_class: its family.
          config: its numbers.
          stack: which parameters of equal shape are kept as one array for all layers.
          options: go to the model's constructor.
        """
        model = nnx.eval_shape(lambda: model_class(config, **options))
        graphdef, state = nnx.split(model)
        values, treedef = jax.tree.flatten(state)
        parameters = []
        for (path, variable), value in zip(nnx.to_flat_state(state), values, strict=True):
            axes = variable.get_metadata()["logical_axes"]
            parameters.append(Leaf(".".join(map(str, path)), value.shape, value.dtype.name, axes))
        return cls(
            graphdef,
            treedef,
            parameters,
            head_path=model.head_path,
            stack=stack,
            logit_soft_cap=config.final_logit_softcapping,
        )

    def merge(self, leaves: Sequence[jax.Array]) -> Decoder:
        """The model, inside a trace, from arrays in the order of `leaves`."""
        values = [self._select(leaves, parameter.path) for parameter in self._parameters]
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, values))

    def abstract(self, sharder: Sharder) -> list[jax.ShapeDtypeStruct]:
        """Shapes, to lower programs with."""
        return [sharder.abstract(leaf.shape, leaf.dtype, leaf.axes) for leaf in self.leaves]

    def locate(self, path: str) -> tuple[int, int | None]:
        """The leaf that holds a parameter, and the layer within it if the leaf is a stack."""
        if path in self._leaf_index:
            return self._leaf_index[path], None
        stacked = _stacked_path(path)
        return self._leaf_index[stacked], _layer_of(path)

    @property
    def parameters(self) -> tuple[Leaf, ...]:
        """Every parameter with its own path and shape, not stacked."""
        return tuple(self._parameters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(int(np.prod(p.shape)) * jnp.dtype(p.dtype).itemsize for p in self._parameters)

    def _select(self, leaves: Sequence[jax.Array], path: str) -> jax.Array | LayerSlice:
        index, layer = self.locate(path)
        return leaves[index] if layer is None else LayerSlice.of_layer(leaves[index], layer)

    def _pack_leaves(self, stack: Stack) -> tuple[Leaf, ...]:
        by_stack: dict[str, list[Leaf]] = {}
        for parameter in self._parameters:
            by_stack.setdefault(_stacked_path(parameter.path), []).append(parameter)
        packed: list[Leaf] = []
        for path, members in by_stack.items():
            first = members[0]
            is_vector = len(first.shape) == 1 or path.endswith(".bias")
            is_wanted = stack == "all" or (stack == "vectors" and is_vector)
            is_equal = len({(m.shape, m.dtype) for m in members}) == 1
            if path == first.path or not (is_wanted and is_equal):
                packed.extend(members)
                continue
            shape, axes = (len(members), *first.shape), ("layers", *first.axes)
            packed.append(Leaf(path, shape, first.dtype, axes))
        return tuple(packed)


class WeightStore:
    """The arrays of a layout while they are being loaded: one parameter at a time."""

    def __init__(self, layout: WeightLayout, sharder: Sharder):
        self.layout, self._sharder = layout, sharder
        self._shapes = {p.path: p for p in layout.parameters}
        self._missing = set(self._shapes)
        self._leaves: list[jax.Array | None] = [None] * len(layout.leaves)

    def expects(self, path: str) -> bool:
        """Whether the model has this parameter."""
        return path in self._shapes

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that were not put yet."""
        return tuple(sorted(self._missing))

    def dtype(self, path: str) -> np.dtype:
        """What a parameter is made of."""
        return jnp.dtype(self._shapes[path].dtype)

    def check(self, path: str, value: ParameterPieces) -> None:
        """Refuse with ValueError a value whose shape is not the model's."""
        shape = self._shapes[path].shape
        if value.shape != shape:
            raise ValueError(f"{path} must have shape {shape}; got {value.shape}")

    def put(self, path: str, value: ParameterPieces) -> None:
        """Upload one parameter, cast to the model's type: to each device its own part.

        It waits for the upload, so that the host holds one parameter at a time.

        Raises:
          ValueError: the shape is not the model's.
        """
        self.check(path, value)
        parameter, dtype = self._shapes[path], self.dtype(path)

        def read(index: Index | None) -> np.ndarray:
            assert index is not None
            return value.read(index, dtype)

        sharding = self._sharder.sharding(parameter.shape, parameter.axes)
        array = jax.make_array_from_callback(parameter.shape, sharding, read, dtype)
        array.block_until_ready()
        index, layer = self.layout.locate(path)
        if layer is None:
            self._leaves[index] = array
        else:
            self._leaves[index] = _insert(self._stack(index), array, np.int32(layer))
        self._missing.discard(path)

    def leaves(self) -> list[jax.Array]:
        """All arrays, in the layout's order."""
        assert not self._missing, self._missing
        return [leaf for leaf in self._leaves if leaf is not None]

    def _stack(self, index: int) -> jax.Array:
        existing = self._leaves[index]
        if existing is not None:
            return existing
        leaf = self.layout.leaves[index]
        sharding = self._sharder.sharding(leaf.shape, leaf.axes)
        return _zeros_maker(leaf.shape, leaf.dtype, sharding)()


def make_dummy_leaves(layout: WeightLayout, sharder: Sharder, seed: int) -> list[jax.Array]:
    """Random weights made on the device: norms are ones, the rest normal with deviation 0.02."""
    arrays = []
    for index, leaf in enumerate(layout.leaves):
        key = jax.random.fold_in(jax.random.key(seed), index)
        make = _dummy_maker(leaf.shape, leaf.dtype, sharder.sharding(leaf.shape, leaf.axes))
        is_norm = leaf.path.endswith("norm.weight")
        arrays.append(make(key, 1.0 if is_norm else 0.0, 0.0 if is_norm else 0.02))
    return arrays


@functools.cache
def _dummy_maker(shape: tuple[int, ...], dtype: str, sharding: jax.sharding.Sharding):
    """A jitted `(key, mean, deviation) -> array`; leaves of one shape share the program.

    A stack is drawn slice by slice, so that the random bits never take a stack's memory.
    """

    def make(key: jax.Array, mean: float, deviation: float) -> jax.Array:
        def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return (jax.random.normal(key, shape) * deviation + mean).astype(dtype)

        if len(shape) < 3:
            return draw(key, shape)
        return jax.lax.map(lambda k: draw(k, shape[1:]), jax.random.split(key, shape[0]))

    return jax.jit(make, out_shardings=sharding)


@functools.cache
def _zeros_maker(
    shape: tuple[int, ...], dtype: str, sharding: jax.sharding.Sharding
) -> Callable[[], jax.Array]:
    """Compiled once for stacks of one shape, and not again where weights are loaded again."""
    return compile_zeros(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))


@functools.partial(jax.jit, donate_argnums=0)
def _insert(stack: jax.Array, array: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)


def _stacked_path(path: str) -> str:
    parts = path.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "layers" else path


def _layer_of(path: str) -> int:
    parts = path.split(".")
    return int(parts[1]) if parts[0] == "layers" and parts[1] != "*" else -1
