"""Which version of the kernels a device can run; asked once, at construction."""

import logging
from dataclasses import dataclass
from typing import Literal, get_args

import jax

from pallas_kernels.triton_gpu.triton_launch import import_jax_triton

logger = logging.getLogger(__name__)

AttentionBackend = Literal["mosaic", "triton", "xla"]

# WGMMA, on which the Mosaic GPU kernels stand, exists on Hopper alone.
MOSAIC_CAPABILITY = "9.0"
# The first with bfloat16 products and asynchronous copies to shared memory.
MIN_TRITON_MAJOR = 8


def choose_attention_backend(requested: str | None = None) -> AttentionBackend:
    """Choose the version of paged attention for the default device.

    Args:
      requested: "mosaic", "triton", "xla", or None for the best that the device can run.

    Returns:
      "mosaic" on an NVIDIA GPU of compute capability 9.0; "triton" on another one from 8.0 on, if
      jax-triton is installed; otherwise "xla".

    Raises:
      ValueError: `requested` is unknown, or the device cannot run it, or jax-triton is missing.
    """
    if requested not in (None, *get_args(AttentionBackend)):
        raise ValueError(f"attention backend must be mosaic, triton or xla; got {requested!r}")
    capability = None if requested == "xla" else gpu_capability()
    if requested == "mosaic" and capability != MOSAIC_CAPABILITY:
        raise _unfit_device(requested, MOSAIC_CAPABILITY, capability)
    if capability == MOSAIC_CAPABILITY and requested != "triton":
        return "mosaic"
    if capability is None or int(capability.split(".")[0]) < MIN_TRITON_MAJOR:
        if requested == "triton":
            raise _unfit_device(requested, f"{MIN_TRITON_MAJOR}.0 or above", capability)
        return "xla"
    try:
        import_jax_triton()
    except ValueError as error:
        if requested == "triton":
            raise
        logger.warning("attention by xla, which is slow on a GPU: %s", error)
        return "xla"
    return "triton"


def _unfit_device(backend: str, wanted: str, capability: str | None) -> ValueError:
    found = "no NVIDIA GPU" if capability is None else f"capability {capability}"
    return ValueError(
        f"attention backend {backend} must run on an NVIDIA GPU of capability {wanted}; "
        f"got {found}; use xla"
    )


@dataclass(frozen=True)
class AssumedGpu:
    """An NVIDIA GPU that this process lacks, and lowers programs for.

    Attributes:
      kind: as "NVIDIA H200".
      capability: as "9.0".
    """

    kind: str
    capability: str


_assumed: AssumedGpu | None = None


def assume_gpu(gpu: AssumedGpu | None) -> None:
    """From now on, answer as if this were the default device; None = answer for the true one.

    For a process that only lowers programs, which another one runs.
    """
    global _assumed
    _assumed = gpu


def default_backend() -> str:
    """The platform that programs are lowered for, "cpu" or "gpu": JAX's, or the assumed one."""
    return jax.default_backend() if _assumed is None else "gpu"


def gpu_capability() -> str | None:
    """Compute capability of the default device, as "9.0"; None where it is no NVIDIA GPU."""
    if _assumed is not None:
        return _assumed.capability
    if jax.default_backend() != "gpu":
        return None
    return getattr(jax.devices()[0], "compute_capability", None)


def gpu_kind() -> str | None:
    """Name of the default device, as "NVIDIA H200"; None where it is no GPU."""
    if _assumed is not None:
        return _assumed.kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
