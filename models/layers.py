"""The parts that decoders share: Linear and its weight format, RMSNorm, embedding, gated MLP."""

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.kernels import Activation, ModelKernels
from models.layer_slice import LayerSlice
from models.products import product_precision
from pallas_kernels.fused.fused_inputs import total

Axes = tuple[str | None, ...]


def abstract_parameter(shape: tuple[int, ...], dtype: str, axes: Axes) -> nnx.Param:
    """A parameter with the logical names of its axes; models are only built under eval_shape."""
    return nnx.Param(jnp.zeros(shape, jnp.dtype(dtype)), logical_axes=axes)


class WeightFormat(Protocol):
    """How a Linear keeps its weights: parameters at construction, a product when called."""

    def parameters(self, in_dims: tuple[int, ...], out_dims: tuple[int, ...], axes: Axes) -> dict:
        """The parameters, by name, of a product from `in_dims` to `out_dims`."""
        ...

    def product(self, x: jax.Array, parameters: dict, num_in_dims: int) -> jax.Array:
        """Contract x's last `num_in_dims` axes with the weights; a sum, as ModelKernels has it."""
        ...

    def norm_product(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        norm: "RMSNorm",
        delta_norm: "RMSNorm | None",
        parameters: dict,
    ) -> tuple[jax.Array, jax.Array]:
        """`norm.add(x, delta, delta_norm)` with the product in place of the norm."""
        ...

    def gate_product(
        self, gate_up: jax.Array, activation: Activation, dtype: jnp.dtype, parameters: dict
    ) -> jax.Array:
        """The product of the gated activation of a sum of [T, 2, F], in the model's dtype."""
        ...

    def fits_gated_up(self, x: jax.Array, parameters: dict) -> bool:
        """Whether `gated_up` takes a norm of x [T, D], and should."""
        ...

    def gated_up(self, x: jax.Array, activation: Activation, parameters: dict) -> jax.Array:
        """The gated activation of the product of x [T, D] with gate and up: [T, F]."""
        ...


@dataclass(frozen=True)
class DenseFormat:
    """Weights in the model's own float type, `[*in_dims, *out_dims]`.

    Attributes:
      dtype: its name.
      kernels: whose product is used.
    """

    dtype: str
    kernels: ModelKernels

    def parameters(self, in_dims: tuple[int, ...], out_dims: tuple[int, ...], axes: Axes) -> dict:
        """One parameter, `weight`."""
        return {"weight": abstract_parameter(in_dims + out_dims, self.dtype, axes)}

    def product(self, x: jax.Array, parameters: dict, num_in_dims: int) -> jax.Array:
        """One matrix product."""
        weight = LayerSlice.of(parameters["weight"].get_value())
        return self.kernels.product(x, weight, num_in_dims)

    def norm_product(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        norm: "RMSNorm",
        delta_norm: "RMSNorm | None",
        parameters: dict,
    ) -> tuple[jax.Array, jax.Array]:
        """As in WeightFormat."""
        return self.kernels.norm_product(
            x,
            delta,
            norm.gains(),
            None if delta_norm is None else delta_norm.gains(),
            LayerSlice.of(parameters["weight"].get_value()),
            eps=norm.eps,
            gain_offset=norm.gain_offset,
        )

    def gate_product(
        self, gate_up: jax.Array, activation: Activation, dtype: jnp.dtype, parameters: dict
    ) -> jax.Array:
        """As in WeightFormat."""
        weight = LayerSlice.of(parameters["weight"].get_value())
        return self.kernels.gate_product(gate_up, weight, dtype=dtype, activation=activation)

    def fits_gated_up(self, x: jax.Array, parameters: dict) -> bool:
        """As in WeightFormat."""
        return self.kernels.fits_gated_up(x, LayerSlice.of(parameters["weight"].get_value()))

    def gated_up(self, x: jax.Array, activation: Activation, parameters: dict) -> jax.Array:
        """As in WeightFormat."""
        assert self.kernels.gated_up is not None, "fits_gated_up says no"
        weight = LayerSlice.of(parameters["weight"].get_value())
        return self.kernels.gated_up(x, weight, activation=activation)


class Linear(nnx.Module):
    """`[T, *in_dims] -> [T, *out_dims]`, with weights in the given format."""

    def __init__(
        self,
        in_dims: tuple[int, ...],
        out_dims: tuple[int, ...],
        *,
        axes: Axes,
        weight_format: WeightFormat,
        bias_dtype: str | None = None,
    ):
        self.num_in_dims, self.num_out_dims = len(in_dims), len(out_dims)
        self.weight_format = weight_format
        parameters = weight_format.parameters(in_dims, out_dims, axes)
        for name, parameter in parameters.items():
            setattr(self, name, parameter)
        self.parameter_names = tuple(parameters)
        self.bias = (
            None
            if bias_dtype is None
            else abstract_parameter(out_dims, bias_dtype, axes[len(in_dims) :])
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Product, and bias if there is one; without it a sum of [T, *out_dims]."""
        product = self.weight_format.product(x, self._parameters(), self.num_in_dims)
        return self.add_bias(product, x.dtype)

    def multiply_normed(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        norm: "RMSNorm",
        delta_norm: "RMSNorm | None" = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The new residual of `norm.add`, and the product of its norm, a sum of [T, *out_dims]."""
        return self.weight_format.norm_product(x, delta, norm, delta_norm, self._parameters())

    def multiply_gated(
        self, gate_up: jax.Array, activation: Activation, dtype: jnp.dtype
    ) -> jax.Array:
        """The product of the gated activation of a sum of [T, 2, F]; a sum of [T, *out_dims]."""
        return self.weight_format.gate_product(gate_up, activation, dtype, self._parameters())

    def fits_gated_up(self, x: jax.Array) -> bool:
        """Whether `gated_up` takes a norm of x [T, D], and should."""
        return self.bias is None and self.weight_format.fits_gated_up(x, self._parameters())

    def gated_up(self, x: jax.Array, activation: Activation) -> jax.Array:
        """The gated activation of the product of x [T, D] with gate and up: [T, F]."""
        return self.weight_format.gated_up(x, activation, self._parameters())

    def add_bias(self, product: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """A sum of [T, *out_dims] with the bias, if there is one; else as it is."""
        if self.bias is None:
            return product
        return total(product, 1 + self.num_out_dims, dtype) + self.bias[...]

    def _parameters(self) -> dict:
        return {name: getattr(self, name) for name in self.parameter_names}


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, statistics in float32 (Zhang, Sennrich 2019).

    Attributes:
      gain_offset: added to the weight in float32.
    """

    gain_offset = 0.0

    def __init__(
        self, size: int, *, eps: float, dtype: str, kernels: ModelKernels, axis: str = "embed"
    ):
        self.eps, self.kernels = eps, kernels
        self.weight = abstract_parameter((size,), dtype, (axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis of [T, size]."""
        return self.add(x, None)[1]

    def add(
        self, x: jax.Array, delta: jax.Array | None, delta_norm: "RMSNorm | None" = None
    ) -> tuple[jax.Array, jax.Array]:
        """Add to the residual, and normalise.

        Args:
          x: [T, size], the residual.
          delta: a sum of [T, size], or None.
          delta_norm: delta is normalised by it before it is added; its eps and offset are these.

        Returns:
          `x + delta` and its norm.
        """
        return self.kernels.add_norm(
            x,
            delta,
            self.gains(),
            None if delta_norm is None else delta_norm.gains(),
            eps=self.eps,
            gain_offset=self.gain_offset,
        )

    def gains(self) -> LayerSlice:
        """What multiplies each normalised component, without the offset: [size]."""
        return LayerSlice.of(self.weight.get_value())


class OffsetRMSNorm(RMSNorm):
    """RMSNorm by `1 + weight`, added in float32 (Gemma)."""

    gain_offset = 1.0


class Embedding(nnx.Module):
    """Token embeddings `[V, D]`; also the weights of a tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str):
        self.weight = abstract_parameter((vocab_size, hidden_size), dtype, ("vocab", "embed"))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32[T] -> [T, D]."""
        return self.weight[...].at[token_ids].get(mode="clip")


class ScaledEmbedding(Embedding):
    """Embeddings times `sqrt(D)`, which is first rounded to the weights' type (Gemma)."""

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32[T] -> [T, D]."""
        x = super().__call__(token_ids)
        return x * jnp.asarray(math.sqrt(x.shape[-1]), x.dtype)


class GatedMLP(nnx.Module):
    """`down(activation(gate(y)) * up(y))` of a norm y; gate and up are fused as `[D, 2, F]`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: str,
        kernels: ModelKernels,
        bias: bool,
        activation: Activation = "silu",
    ):
        self.activation: Activation = activation
        weight_format, bias_dtype = DenseFormat(dtype, kernels), dtype if bias else None
        self.gate_up_proj = Linear(
            (hidden_size,),
            (2, intermediate_size),
            axes=("embed", "gate_up", "mlp"),
            weight_format=weight_format,
            bias_dtype=bias_dtype,
        )
        self.down_proj = Linear(
            (intermediate_size,),
            (hidden_size,),
            axes=("mlp", "embed"),
            weight_format=weight_format,
            bias_dtype=bias_dtype,
        )

    def __call__(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        norm: RMSNorm,
        delta_norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Run on a norm of the residual.

        Args:
          x: [T, D], the residual.
          delta: as `norm.add` takes it.
          norm: over the hidden size.
          delta_norm: as `norm.add` takes it.

        Returns:
          The residual of `norm.add`, and a sum of [T, D] that is still to be added to it.
        """
        if self.gate_up_proj.fits_gated_up(x):
            x, normed = norm.add(x, delta, delta_norm)
            return x, self.down_proj(self.gate_up_proj.gated_up(normed, self.activation))
        x, gate_up = self.gate_up_proj.multiply_normed(x, delta, norm, delta_norm)
        gate_up = self.gate_up_proj.add_bias(gate_up, x.dtype)
        down = self.down_proj.multiply_gated(gate_up, self.activation, x.dtype)
        return x, self.down_proj.add_bias(down, x.dtype)


def compute_logits(
    weight: jax.Array, hidden: jax.Array, soft_cap: float | None = None
) -> jax.Array:
    """Logits of the vocabulary.

    Args:
      weight: [V, D], the head's or the tied embedding's.
      hidden: [R, D].
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`; None = they stay.

    Returns:
      float32[R, V].
    """
    logits = jnp.einsum(
        "rd,vd->rv",
        hidden,
        weight,
        precision=product_precision(weight.dtype),
        preferred_element_type=jnp.float32,
    )
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
