"""The parts that decoders share: Linear and its weight format, RMSNorm, embedding, gated MLP."""

import math
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
        """One matrix product over flattened dimensions, so that every fused weight is a matrix."""
        weight = parameters["weight"][...]
        in_dims, out_dims = weight.shape[:num_in_dims], weight.shape[num_in_dims:]
        tokens = x.shape[: x.ndim - num_in_dims]
        matrix = weight.reshape(math.prod(in_dims), math.prod(out_dims))
        y = jnp.dot(
            x.reshape(math.prod(tokens), math.prod(in_dims)),
            matrix,
            precision=product_precision(weight.dtype),
        )
        return y.reshape(*tokens, *out_dims)


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
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """Token embeddings `[V, D]`; also the weights of a tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str):
        self.weight = abstract_parameter((vocab_size, hidden_size), dtype, ("vocab", "embed"))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32[T] -> [T, D]."""
        return self.weight[...].at[token_ids].get(mode="clip")


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up fused as `[D, 2, F]`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: str, bias: bool):
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
        return self.down_proj(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])


def compute_logits(weight: jax.Array, hidden: jax.Array) -> jax.Array:
    """Logits of the vocabulary.

    Args:
      weight: [V, D], the head's or the tied embedding's.
      hidden: [R, D].

    Returns:
      float32[R, V].
    """
    return jnp.einsum(
        "rd,vd->rv",
        hidden,
        weight,
        precision=product_precision(weight.dtype),
        preferred_element_type=jnp.float32,
    )
