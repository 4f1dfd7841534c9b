"""ModelKernels: the operations a model is made of, chosen once, and their split over a mesh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from models import few_rows
from models.layer_slice import LayerSlice
from models.products import fits_gated_up, multiply, multiply_and_gate, skinny_or_multiply
from pallas_kernels.attention import decode_attention, prefill_attention, xla_attention
from pallas_kernels.fused import add_norm, gated_activation, kv_write, rotary_write, xla_fused
from pallas_kernels.fused.fused_inputs import total
from pallas_kernels.fused.xla_fused import Activation
from pallas_kernels.platform import AttentionBackend
from pallas_kernels.triton_gpu import triton_decode, triton_prefill, triton_rotary_write

HEADS = PartitionSpec(None, "model", None)
"""Of [T, N, H] queries and outputs."""
PAGES = PartitionSpec(None, None, None, "model", None)
"""Of [L, P, B, K, H] pages."""
COLUMNS = PartitionSpec(None, "model")
"""Of [T, F]."""
COLUMN_PAIRS = PartitionSpec(None, None, "model")
"""Of gate and up, [T, 2, F]."""
WHOLE = PartitionSpec()
"""Of what every device has all of: hidden states, norms, page tables, lengths, slots, offsets."""

AnyMesh = Mesh | AbstractMesh
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class ModelKernels:
    """The functions of one backend, chosen once at construction.

    A "sum" is a product's result [T, ...], or float32[P, T, ...] whose total over P is meant.

    Attributes:
      decode: attends the newest query of each row.
      mixed_decode: the same, where rows without tokens stand last and nobody reads their results.
      prefill: attends ragged chunks of queries.
      rotary_write: a sum of [T, K, G + 2, H] to rotated queries; puts keys and values into pages.
      add_norm: adds a sum to the residual, and normalises.
      gated_activation: a sum of [T, 2, F] to [T, F].
      product: `(x, weight, num_in_dims)` to a sum.
      fuses_few_rows: products of few rows begin with the norm or the gate before them, and their
        attention with `rotary_write`, which then takes `run=`, a function in place of its kernel
        (`write_rotated`). Only where `product` may give a row other bits than it has among many
        rows.
      gated_up: `(x, weight, activation=)` to [T, F] in x's dtype: the gated activation of the
        product of x [T, D] and a weight [D, 2, F]; None = no kernel does both.
    """

    decode: Kernel
    mixed_decode: Kernel
    prefill: Kernel
    rotary_write: Kernel
    add_norm: Kernel
    gated_activation: Kernel
    product: Kernel
    fuses_few_rows: bool = False
    gated_up: Kernel | None = None

    def norm_product(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        gains: LayerSlice,
        delta_gains: LayerSlice | None,
        weight: LayerSlice,
        *,
        eps: float,
        gain_offset: float,
    ) -> tuple[jax.Array, jax.Array]:
        """`add_norm`, and a sum: the product of the norm [T, D] and a weight [D, *out_dims]."""
        options = {"eps": eps, "gain_offset": gain_offset}
        if self.fuses_few_rows and delta_gains is None and few_rows.fits_norm(x, weight):
            return few_rows.multiply_normed(x, delta, gains, weight, **options)
        x, normed = self.add_norm(x, delta, gains, delta_gains, **options)
        return x, self.product(normed, weight, 1)

    def gate_product(
        self, gate_up: jax.Array, weight: LayerSlice, *, dtype: jnp.dtype, activation: Activation
    ) -> jax.Array:
        """`gated_activation`, and a sum: the product of its result [T, F] and a weight [F, D]."""
        if self.fuses_few_rows and few_rows.fits_gate(gate_up, weight, dtype):
            return few_rows.multiply_gated(gate_up, weight, activation=activation)
        gated = self.gated_activation(gate_up, dtype=dtype, activation=activation)
        return self.product(gated, weight, 1)

    def fits_gated_up(self, x: jax.Array, weight: LayerSlice) -> bool:
        """Whether there is a `gated_up` that takes, and should, x [T, D] and a weight [D, 2, F]."""
        return self.gated_up is not None and fits_gated_up(x, weight)


def model_kernels(
    backend: AttentionBackend, platform: str, mesh: AnyMesh | None = None
) -> ModelKernels:
    """The kernels of a backend on a JAX platform ("cpu" or "gpu").

    Args:
      backend: which version.
      platform: chooses how XLA writes into pages.
      mesh: the devices that share the heads; with more than one, each device runs the kernels on
        its own KV heads and their query heads. K must be a multiple of the number of devices.
    """
    split_mesh = None if mesh is None or mesh.size == 1 else mesh
    if backend == "mosaic":
        return _mosaic_kernels(split_mesh)
    if backend == "triton":
        return _triton_kernels(split_mesh)
    write = kv_write.write_by_loop if platform == "cpu" else kv_write.write_by_scatter
    return _xla_kernels(write, split_mesh)


def _xla_kernels(write: Kernel, mesh: AnyMesh | None) -> ModelKernels:
    """Attention over gathered pages; what is not attention XLA splits over the mesh by itself."""
    decode = _split(xla_attention.decode_attention, mesh, *_DECODE)
    return ModelKernels(
        decode=decode,
        mixed_decode=decode,
        prefill=_split(xla_attention.prefill_attention, mesh, *_PREFILL),
        rotary_write=_split(functools.partial(_rotary_write_by_xla, write), mesh, *_ROTARY_WRITE),
        add_norm=functools.partial(_add_norm, run=xla_fused.add_norm),
        gated_activation=_gate_by_xla,
        product=multiply,
    )


def _triton_kernels(mesh: AnyMesh | None) -> ModelKernels:
    """Attention and the write into pages for NVIDIA GPUs without WGMMA; the rest is XLA's."""
    write = functools.partial(write_rotated, run=triton_rotary_write.rotary_write)
    decode = _split(triton_decode.decode_attention, mesh, *_DECODE)
    return replace(
        _xla_kernels(kv_write.write_by_scatter, mesh),
        decode=decode,
        mixed_decode=decode,
        prefill=_split(triton_prefill.prefill_attention, mesh, *_PREFILL),
        rotary_write=_split(write, mesh, *_ROTARY_WRITE),
    )


def _mosaic_kernels(mesh: AnyMesh | None) -> ModelKernels:
    """The kernels for Hopper.

    Products are XLA's where devices share the weights: it adds up what each of them has, and splits
    gate and up.
    """
    decode = decode_attention.decode_attention
    mixed_decode = functools.partial(decode, leaves_padding=True)
    return ModelKernels(
        decode=_split(decode, mesh, *_DECODE),
        mixed_decode=_split(mixed_decode, mesh, *_DECODE),
        prefill=_split(prefill_attention.prefill_attention, mesh, *_PREFILL),
        rotary_write=_split(write_rotated, mesh, *_ROTARY_WRITE),
        add_norm=_split(_add_norm, mesh, (WHOLE,) * 4, (WHOLE, WHOLE)),
        gated_activation=_split(_gate, mesh, (COLUMN_PAIRS,), COLUMNS),
        product=skinny_or_multiply if mesh is None else multiply,
        fuses_few_rows=mesh is None,
        gated_up=multiply_and_gate if mesh is None else None,
    )


_HEAD_ROWS = PartitionSpec(None, "model", None, None)  # of [T or L, K, G + 2, H]

# What a split function takes and gives, as PartitionSpecs of its positional arrays.
_CACHE = (PAGES, PAGES, WHOLE, WHOLE, WHOLE)  # k_pages, v_pages, layer, page_table, seq_lens
_DECODE = ((HEADS, *_CACHE), HEADS)
_PREFILL = ((HEADS, *_CACHE, WHOLE, WHOLE, HEADS), HEADS)
_BIAS = LayerSlice(_HEAD_ROWS, WHOLE)  # pyright: ignore[reportArgumentType]
_ROTARY_WRITE = (
    # qkv, k_pages, v_pages, cache_layer, slots, cos, sin, bias, q_gains, k_gains
    (_HEAD_ROWS, PAGES, PAGES, *(WHOLE,) * 4, _BIAS, WHOLE, WHOLE),
    (HEADS, PAGES, PAGES),
)


def _split(kernel: Kernel, mesh: AnyMesh | None, in_specs: tuple, out_specs: Any) -> Kernel:
    """The same function on global arrays, each device at its own part.

    XLA cannot cut a Pallas kernel into parts; heads and columns need nothing of each other, so no
    device talks to another here.

    Args:
      kernel: positional arrays are split as `in_specs`; keyword options are static.
      mesh: None = one device; the function itself.
      in_specs: of the positional arrays.
      out_specs: of what comes out.
    """
    if mesh is None:
        return kernel

    def run(*arrays: Any, **options: Any) -> Any:
        local = functools.partial(kernel, **options)
        specs = tuple(
            None if array is None else spec for array, spec in zip(arrays, in_specs, strict=True)
        )
        # A Pallas call does not say which axes its output varies over, so nothing can be checked.
        split = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
        return split(*arrays)

    return run


def write_rotated(
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    cache_layer: jax.Array,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: LayerSlice | None,
    q_gains: LayerSlice | None,
    k_gains: LayerSlice | None,
    *,
    eps: float,
    gain_offset: float,
    run: Kernel | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `rotary_write.rotary_write`, of a sum of [T, K, G + 2, H]; by `run`, or by what fits.

    Bias and gains have one layer index: all are stacked, or none is.
    """
    K, G2, H = qkv.shape[-3:]
    if run is None:
        fits = rotary_write.fits_rotary_write(H, 2 * cos.shape[-1], k_pages.shape[-1])
        by_scatter = functools.partial(xla_fused.rotary_write, write=kv_write.write_by_scatter)
        run = rotary_write.rotary_write if fits else by_scatter
    layers = [array.layer for array in (bias, q_gains, k_gains) if array is not None]
    return run(
        qkv.reshape(*qkv.shape[:-3], K * G2 * H),
        k_pages,
        v_pages,
        layers[0] if layers else jnp.zeros(1, jnp.int32),
        cache_layer,
        slots,
        cos,
        sin,
        num_kv_heads=K,
        head_dim=H,
        bias=None if bias is None else bias.stack.reshape(-1, K * G2 * H),
        q_gains=None if q_gains is None else q_gains.stack,
        k_gains=None if k_gains is None else k_gains.stack,
        eps=eps,
        gain_offset=gain_offset,
    )


def _rotary_write_by_xla(write: Kernel, *arrays: Any, **options: Any):
    run = functools.partial(xla_fused.rotary_write, write=write)
    return write_rotated(*arrays, **options, run=run)


def _add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    gains: LayerSlice,
    delta_gains: LayerSlice | None = None,
    *,
    eps: float,
    gain_offset: float,
    run: Kernel | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x + delta` for a sum delta, which may be normalised itself, and its norm.

    A whole delta is XLA's to add: it does so within the product that gives it.
    """
    if delta is not None and delta.ndim == x.ndim and delta_gains is None:
        x, delta = x + delta, None
    if run is None:
        fits = add_norm.fits_add_norm(x.shape[-1])
        run = add_norm.add_norm if fits else xla_fused.add_norm
    stack = None if delta_gains is None else delta_gains.stack
    options = {"eps": eps, "gain_offset": gain_offset, "delta_gains": stack}
    return run(x, delta, gains.stack, gains.layer, **options)


def _gate(gate_up: jax.Array, *, dtype: jnp.dtype, activation: Activation) -> jax.Array:
    """A sum of [T, 2, F] to `activation(gate) * up`, [T, F] in the dtype."""
    F = gate_up.shape[-1]
    if not gated_activation.fits_gated_activation(F):
        return _gate_by_xla(gate_up, dtype=dtype, activation=activation)
    flat = gate_up.reshape(*gate_up.shape[:-2], 2 * F)
    return gated_activation.gated_activation(flat, activation=activation, dtype=dtype)


def _gate_by_xla(gate_up: jax.Array, *, dtype: jnp.dtype, activation: Activation) -> jax.Array:
    """The same, not flattened: [T, 2 * F] could not say that F is split over a mesh."""
    gate_up = total(gate_up, 3, dtype)
    return xla_fused.ACTIVATIONS[activation](gate_up[:, 0]) * gate_up[:, 1]
