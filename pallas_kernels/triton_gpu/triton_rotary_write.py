"""Bias, q and k norm, rotary embedding and the write of K and V in one Triton kernel."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.fused.fused_inputs import check_rotary_inputs
from pallas_kernels.triton_gpu.triton_launch import (
    import_jax_triton,
    launch,
    passes_aliased_outputs,
)

MANY_TOKENS = 1024  # from here on, bandwidth counts and no longer a token's latency


@functools.partial(jax.jit, static_argnames=("num_kv_heads", "head_dim", "eps", "gain_offset"))
def rotary_write(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    cache_layer: jax.Array,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_kv_heads: int,
    head_dim: int,
    bias: jax.Array | None = None,
    q_gains: jax.Array | None = None,
    k_gains: jax.Array | None = None,
    eps: float = 0.0,
    gain_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Make queries, keys and values of the qkv product, and write keys and values to their pages.

    Args:
      qkv: [T, K * (G + 2) * H] bfloat16 or float16, as [K, G + 2, H]: the queries of a KV head,
        its key, its value; or float32[P, T, K * (G + 2) * H] whose total over P is first rounded
        to the pages' dtype.
      k_pages: [Lg, P, B, K, Hs] in the model dtype, Hs at least H. Donate it: it is updated in
        place.
      v_pages: as k_pages.
      layer: int32[1], which bias and gains to read.
      cache_layer: int32[1], which layer of the pages to write.
      slots: int32[T], page * B + offset. Padding tokens point into page 0, which no sequence
        owns, and may do so several times.
      cos: float32[T, rotary_dim / 2], cosines of the positions.
      sin: as cos.
      num_kv_heads: K.
      head_dim: H.
      bias: [L, K * (G + 2) * H] in the model dtype, of all layers.
      q_gains: [L, H]; each query head is normalised by them before it is rotated.
      k_gains: [L, H]; the same of the key heads. Both or none.
      eps: added to the mean square.
      gain_offset: added to the gains in float32.

    Returns:
      [T, K * G, Hs] rotated queries in the model dtype, and the pages after the write. Dimensions
      from H on are zero.

    Raises:
      ValueError: shapes or dtypes do not fit, or jax-triton is not installed.
    """
    if k_pages.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"pages must be bfloat16 or float16; got {k_pages.dtype}")
    group = check_rotary_inputs(
        qkv, k_pages, v_pages, slots, (cos, sin), bias, (q_gains, k_gains), num_kv_heads, head_dim
    )
    import_jax_triton()
    from pallas_kernels.triton_gpu import triton_rotary_write_kernel as kernels

    T, half, stored = slots.shape[0], cos.shape[1], k_pages.shape[4]
    tokens, num_warps = (16, 4) if T >= MANY_TOKENS else (4, 1)
    is_both = passes_aliased_outputs()
    inputs = (qkv, layer, cache_layer, slots, cos, sin)
    inputs += tuple(qkv if array is None else array for array in (bias, q_gains, k_gains))
    return launch(
        *inputs,
        k_pages,
        v_pages,
        T,
        kernel=kernels.rotary_write_kernel_of_both if is_both else kernels.rotary_write_kernel,
        out=(
            jax.ShapeDtypeStruct((T, num_kv_heads * group, stored), k_pages.dtype),
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        grid=(num_kv_heads * (group + 2), -(-T // tokens)),
        PARTS=qkv.shape[0] if qkv.ndim == 3 else 0,
        HAS_BIAS=bias is not None,
        HAS_GAINS=q_gains is not None,
        EPS=eps,
        GAIN_OFFSET=gain_offset,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        STORED=stored,
        LAYER_STRIDE=k_pages[0].size,
        TOKENS=tokens,
        LANES=_power_of_two(half),
        REST_LANES=_power_of_two(stored - 2 * half),
        num_warps=num_warps,
    )


def _power_of_two(size: int) -> int:
    """The smallest one that is at least `size` and 1."""
    return 1 << max(size - 1, 0).bit_length()
