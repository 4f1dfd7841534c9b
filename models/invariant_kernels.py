"""The kernels of the batch-invariant mode: a row's bits depend on nothing of other rows.

Each sums up in an order that follows from the model alone: products by chunks of K that follow from
the weight, attention by blocks of keys from the sequence's start, norms by threads that follow from
the width. So a token has the same bits in any batch, bucket and chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.config import ModelConfig
from models.kernels import ModelKernels, write_rotated
from models.layer_slice import LayerSlice
from pallas_kernels.attention import decode_as_prefill, prefill_attention
from pallas_kernels.fused import add_norm, gated_activation, rotary_write
from pallas_kernels.fused.fused_inputs import total
from pallas_kernels.fused.xla_fused import Activation
from pallas_kernels.products.fixed_order_product import (
    fits_fixed_order_product,
    fixed_order_product,
)

_ROTARY_WRITE_TUNING = rotary_write.RotaryWriteTuning(query_heads=1, written_tokens=1)
_GATE_TUNING = gated_activation.choose_gated_activation_tuning(1)


def invariance_refusal(model: ModelConfig, dtype: str, stored_head_dim: int) -> str | None:
    """Why the kernels do not take a model, as the end of a sentence; None where they do."""
    if dtype == "float32":
        return "must have a 16-bit dtype; got float32"
    D, F, V, H = model.hidden_size, model.intermediate_size, model.vocab_size, model.head_dim
    heads = model.num_attention_heads * H
    for depth, columns in ((D, model.qkv_size), (heads, D), (D, 2 * F), (F, D), (D, V)):
        if not fits_fixed_order_product(depth, columns, dtype):
            return f"must have products of multiples of 64; got {depth} times {columns}"
    if not (
        add_norm.fits_add_norm(D)
        and gated_activation.fits_gated_activation(F)
        and rotary_write.fits_rotary_write(H, model.rotary_dim, stored_head_dim)
    ):
        return f"must have sizes that the kernels take; got hidden {D}, MLP {F} and head {H}"
    return None


def invariant_kernels(interpret: Any = None) -> ModelKernels:
    """The operations of a model on one Hopper GPU.

    Args:
      interpret: `plgpu.InterpretGPUParams()` runs the kernels on the CPU.
    """
    decode = functools.partial(decode_as_prefill.decode_attention, interpret=interpret)
    return ModelKernels(
        decode=decode,
        mixed_decode=decode,
        prefill=functools.partial(prefill_attention.prefill_attention, interpret=interpret),
        rotary_write=functools.partial(_rotary_write, interpret),
        add_norm=functools.partial(_add_norm, interpret),
        gated_activation=functools.partial(_gate, interpret),
        product=functools.partial(_product, interpret),
    )


def compute_invariant_logits(
    weight: jax.Array, hidden: jax.Array, soft_cap: float | None = None, *, interpret: Any = None
) -> jax.Array:
    """As `models.layers.compute_logits`."""
    first = jnp.zeros(1, jnp.int32)
    parts = fixed_order_product(
        hidden,
        weight[None],
        first,
        transposed=True,
        out_dtype=jnp.float32,
        interpret=interpret,
    )
    logits = total(parts, 2, jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    # Whoever reads the logits shall read these, and not compute them anew in another fusion.
    return lax.optimization_barrier(logits)


def _rotary_write(interpret: Any, *arrays: Any, **options: Any):
    run = functools.partial(
        rotary_write.rotary_write, tuning=_ROTARY_WRITE_TUNING, interpret=interpret
    )
    return write_rotated(*arrays, **options, run=run)


def _add_norm(
    interpret: Any,
    x: jax.Array,
    delta: jax.Array | None,
    gains: LayerSlice,
    delta_gains: LayerSlice | None = None,
    *,
    eps: float,
    gain_offset: float,
) -> tuple[jax.Array, jax.Array]:
    """The kernel adds a whole delta, too: XLA could round the sum in another way."""
    return add_norm.add_norm(
        x,
        delta,
        gains.stack,
        gains.layer,
        eps=eps,
        gain_offset=gain_offset,
        delta_gains=None if delta_gains is None else delta_gains.stack,
        interpret=interpret,
        tuning=add_norm.choose_add_norm_tuning(1, x.shape[1]),
    )


def _gate(
    interpret: Any, gate_up: jax.Array, *, dtype: jnp.dtype, activation: Activation
) -> jax.Array:
    """A sum of [T, 2, F] to [T, F]."""
    flat = gate_up.reshape(*gate_up.shape[:-2], 2 * gate_up.shape[-1])
    return gated_activation.gated_activation(
        flat, activation=activation, dtype=dtype, interpret=interpret, tuning=_GATE_TUNING
    )


def _product(interpret: Any, x: jax.Array, weight: LayerSlice, num_in_dims: int) -> jax.Array:
    """A sum of [T, *out_dims]."""
    stack = weight.matrices(num_in_dims)
    flat = x.reshape(x.shape[0], stack.shape[1])
    out = fixed_order_product(flat, stack, weight.layer, interpret=interpret)
    return out.reshape(*out.shape[:-1], *weight.shape[num_in_dims:])
