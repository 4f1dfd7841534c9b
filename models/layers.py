"""The parts that decoders share: Linear and its weight format, RMSNorm, embedding, gated MLP."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Axes = tuple[str | None, ...]


def abstract_parameter(shape: tuple[int, ...], dtype: str, axes: Axes) -> nnx.Param:
    """A parameter with the logical names of its axes; models are only built under eval_shape."""
    return nnx.Param(jnp.zeros(shape, jnp.dtype(dtype)), logical_axes=axes)


def product_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Float32 models multiply in full float32 on every device (GPUs default to TF32)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


class WeightFormat(Protocol):
    """How a Linear keeps its weights: parameters at construction, a product when called."""

    def parameters(self, in_dims: tuple[int, ...], out_dims: tuple[int, ...], axes: Axes) -> dict:
        """The parameters, by name, of a product from `in_dims` to `out_dims`."""
        ...

    def product(self, x: jax.Array, parameters: dict, num_in_dims: int) -> jax.Array:
        """Contract x's last `num_in_dims` axes with the weights."""
        ...


@dataclass(frozen=True)
class DenseFormat:
    """Weights in the model's own float type, `[*in_dims, *out_dims]`."""

    dtype: str

    def parameters(self, in_dims: tuple[int, ...], out_dims: tuple[int, ...], axes: Axes) -> dict:
        """One parameter, `weight`."""
        return {"weight": abstract_parameter(in_dims + out_dims, self.dtype, axes)}

    def product(self, x: jax.Array, parameters: dict, num_in_dims: int) -> jax.Array:
        """One matrix product; XLA flattens what is fused, but after it has split it.

        Flattened here, gate and up `[D, 2, F]` would be gathered whole on every device, since a
        matrix `[D, 2 * F]` cannot say that it is split over F alone.
        """
        weight = parameters["weight"][...]
        in_dims = weight.shape[:num_in_dims]
        tokens = x.shape[: x.ndim - num_in_dims]
        return jnp.tensordot(
            x.reshape(*tokens, math.prod(in_dims)),
            weight.reshape(math.prod(in_dims), *weight.shape[num_in_dims:]),
            axes=1,
            precision=product_precision(weight.dtype),
        )


class Linear(nnx.Module):
    """`[..., *in_dims] -> [..., *out_dims]`, with weights in the given format."""

    def __init__(
        self,
        in_dims: tuple[int, ...],
        out_dims: tuple[int, ...],
        *,
        axes: Axes,
        weight_format: WeightFormat,
        bias_dtype: str | None = None,
    ):
        self.num_in_dims = len(in_dims)
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
        """Product, and bias if there is one."""
        parameters = {name: getattr(self, name) for name in self.parameter_names}
        y = self.weight_format.product(x, parameters, self.num_in_dims)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, statistics in float32 (Zhang, Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, dtype: str, axis: str = "embed"):
        self.eps = eps
        self.weight = abstract_parameter((size,), dtype, (axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.gain()).astype(x.dtype)

    def gain(self) -> jax.Array:
        """What multiplies each normalised component, float32[size]."""
        return self.weight[...].astype(jnp.float32)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm by `1 + weight`, added in float32 (Gemma)."""

    def gain(self) -> jax.Array:
        """What multiplies each normalised component, float32[size]."""
        return 1 + super().gain()


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


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`, gate and up fused as `[D, 2, F]`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: str,
        bias: bool,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        self.activation = activation
        weight_format, bias_dtype = DenseFormat(dtype), dtype if bias else None
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

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate_up = self.gate_up_proj(x)
        return self.down_proj(self.activation(gate_up[:, 0]) * gate_up[:, 1])


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
