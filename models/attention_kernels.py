"""AttentionKernels: the functions of one attention backend, and their split over a mesh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from pallas_kernels import decode_attention, kv_write, prefill_attention, xla_attention
from pallas_kernels.platform import AttentionBackend

HEADS = PartitionSpec(None, "model", None)
"""Of [T, N, H] queries and outputs, and of [T, K, H] keys and values."""
PAGES = PartitionSpec(None, None, None, "model", None)
"""Of [L, P, B, K, H] pages."""
WHOLE = PartitionSpec()
"""Of page tables, lengths, slots and offsets: every device has all of them."""

AnyMesh = Mesh | AbstractMesh
Kernel = Callable[..., jax.Array]


@dataclass(frozen=True)
class AttentionKernels:
    """The functions of one backend, chosen once at construction.

    Attributes:
      decode: attends the newest query of each row.
      prefill: attends ragged chunks of queries.
      write: puts new keys or values into pages.
    """

    decode: Kernel
    prefill: Kernel
    write: Kernel


def attention_kernels(
    backend: AttentionBackend, platform: str, mesh: AnyMesh | None = None
) -> AttentionKernels:
    """The kernels of a backend on a JAX platform ("cpu" or "gpu").

    Args:
      backend: which version of attention.
      platform: chooses the version of the write.
      mesh: the devices that share the heads; with more than one, each device runs the kernels on
        its own KV heads and their query heads. K must be a multiple of the number of devices.
    """
    write = kv_write.write_by_loop if platform == "cpu" else kv_write.write_by_scatter
    if backend == "mosaic":
        decode, prefill = decode_attention.decode_attention, prefill_attention.prefill_attention
    else:
        decode, prefill = xla_attention.decode_attention, xla_attention.prefill_attention
    kernels = AttentionKernels(decode=decode, prefill=prefill, write=write)
    return kernels if mesh is None or mesh.size == 1 else _split_over_heads(kernels, mesh)


def _split_over_heads(kernels: AttentionKernels, mesh: AnyMesh) -> AttentionKernels:
    """The same functions on global arrays, each device at its own heads.

    XLA cannot cut a Pallas kernel into parts; heads need nothing of each other, so no device
    talks to another here.
    """
    cache = (PAGES, PAGES, WHOLE, WHOLE, WHOLE)  # k_pages, v_pages, layer, page_table, seq_lens
    attend = functools.partial(_on_each_device, mesh=mesh, out_spec=HEADS)
    return AttentionKernels(
        decode=attend(kernels.decode, in_specs=(HEADS, *cache)),
        prefill=attend(kernels.prefill, in_specs=(HEADS, *cache, WHOLE, WHOLE)),
        write=_on_each_device(
            kernels.write, mesh=mesh, in_specs=(PAGES, WHOLE, WHOLE, HEADS), out_spec=PAGES
        ),
    )


def _on_each_device(
    kernel: Kernel,
    *,
    mesh: AnyMesh,
    in_specs: tuple[PartitionSpec, ...],
    out_spec: PartitionSpec,
) -> Kernel:
    """A kernel whose positional arrays are split as `in_specs`; keyword options are static."""

    def run(*arrays: jax.Array, **options) -> jax.Array:
        local = functools.partial(kernel, **options)
        # A Pallas call does not say which axes its output varies over, so nothing can be checked.
        split = jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False
        )
        return split(*arrays)

    return run
