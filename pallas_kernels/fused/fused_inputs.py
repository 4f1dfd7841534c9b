"""What the fused operations take: a product's result, whole or as the partial sums of a split K."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Activation = Literal["silu", "gelu_tanh"]


def check_sum(name: str, value: jax.Array, width: int, dtype: DTypeLike) -> None:
    """Refuse what is no "sum".

    Args:
      name: of the argument, for the message.
      value: [T, width] in `dtype`, or float32[P, T, width], whose total over P is meant.
      width: of the product.
      dtype: of the model.

    Raises:
      ValueError: rank, width or dtype do not fit.
    """
    is_whole = value.ndim == 2 and value.dtype == jnp.dtype(dtype)
    is_partial = value.ndim == 3 and value.dtype == jnp.float32 and value.shape[0] > 0
    if not (is_whole or is_partial) or value.shape[-1] != width:
        raise ValueError(
            f"{name} must be [T, {width}] {jnp.dtype(dtype).name} or float32[P, T, {width}]; "
            f"got {value.shape} {value.dtype}"
        )


def total(value: jax.Array, num_axes: int, dtype: DTypeLike) -> jax.Array:
    """A "sum" as one array: the parts are added in order in float32, and rounded once.

    Args:
      value: the product's result of `num_axes` axes, or float32 with an axis of parts before them.
      num_axes: of the result.
      dtype: of the model, to which the total of parts is rounded.
    """
    if value.ndim == num_axes:
        return value
    added = functools.reduce(jnp.add, [value[part] for part in range(value.shape[0])])
    # XLA leaves out a cast that another one undoes, but not this.
    limits = jnp.finfo(dtype)
    return lax.reduce_precision(added, limits.nexp, limits.nmant).astype(dtype)


def check_shape(name: str, value: jax.Array, shape: tuple[int | None, ...]) -> None:
    """Refuse an array of another shape; None fits any size.

    Raises:
      ValueError: the shape differs.
    """
    fits = value.ndim == len(shape) and all(
        want is None or got == want for got, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}]; got {value.shape}")


def check_rotary_inputs(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slots: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    bias: jax.Array | None,
    gains: tuple[jax.Array | None, jax.Array | None],
    num_kv_heads: int,
    head_dim: int,
) -> int:
    """Refuse what `rotary_write` cannot read; its docstring says what each array is.

    Returns:
      G, query heads a KV head.

    Raises:
      ValueError: a shape or a dtype does not fit.
    """
    check_shape("k_pages", k_pages, (None, None, None, num_kv_heads, None))
    check_shape("v_pages", v_pages, k_pages.shape)
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(f"v_pages must be {k_pages.dtype}, as k_pages; got {v_pages.dtype}")
    width, block = qkv.shape[-1], num_kv_heads * head_dim
    group = width // block - 2
    if width % block or group < 1:
        raise ValueError(
            f"qkv must be [T, K * (G + 2) * H] for {num_kv_heads} KV heads of {head_dim}; "
            f"got {qkv.shape}"
        )
    check_sum("qkv", qkv, width, k_pages.dtype)
    if k_pages.shape[4] < head_dim:
        raise ValueError(f"the pages' head dim must be at least {head_dim}; got {k_pages.shape}")
    num_tokens = qkv.shape[-2]
    check_shape("slots", slots, (num_tokens,))
    for name, angle in zip(("cos", "sin"), angles, strict=True):
        check_shape(name, angle, (num_tokens, angles[0].shape[-1]))
    if bias is not None:
        check_shape("bias", bias, (None, width))
    if (gains[0] is None) != (gains[1] is None):
        raise ValueError("q_gains and k_gains must come together; got one of them")
    for name, gain in zip(("q_gains", "k_gains"), gains, strict=True):
        if gain is not None:
            check_shape(name, gain, (None, head_dim))
    return group


def check_gate_up_inputs(gate_up: jax.Array, activation: str, dtype: DTypeLike) -> None:
    """Refuse what `gated_activation` cannot read; its docstring says what each array is.

    Raises:
      ValueError: a shape or a dtype does not fit, or the activation is unknown.
    """
    if activation not in get_args(Activation):
        known = " or ".join(get_args(Activation))
        raise ValueError(f"activation must be {known}; got {activation!r}")
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(f"gate_up must hold as much gate as up; got width {width}")
    check_sum("gate_up", gate_up, width, dtype)
