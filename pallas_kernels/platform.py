"""Which version of the kernels a device can run; asked once, at construction."""

from typing import Literal

import jax

AttentionBackend = Literal["mosaic", "xla"]

# WGMMA, on which the Mosaic GPU kernels stand, exists on Hopper alone.
MOSAIC_CAPABILITY = "9.0"


def choose_attention_backend(requested: str | None = None) -> AttentionBackend:
    """Choose the version of paged attention for the default device.

    Args:
      requested: "mosaic", "xla", or None for the best that the device can run.

    Returns:
      "mosaic" on an NVIDIA GPU of compute capability 9.0, otherwise "xla".

    Raises:
      ValueError: `requested` is unknown, or the device cannot run it.
    """
    if requested not in (None, "mosaic", "xla"):
        raise ValueError(f"attention backend must be mosaic or xla; got {requested!r}")
    if requested == "xla":
        return "xla"
    capability = gpu_capability()
    if capability == MOSAIC_CAPABILITY:
        return "mosaic"
    if requested == "mosaic":
        found = "no NVIDIA GPU" if capability is None else f"capability {capability}"
        raise ValueError(
            f"attention backend mosaic must run on an NVIDIA GPU of capability "
            f"{MOSAIC_CAPABILITY}; got {found}; use xla"
        )
    return "xla"


def gpu_capability() -> str | None:
    """Compute capability of the default device, as "9.0"; None where it is no NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    return getattr(jax.devices()[0], "compute_capability", None)


def gpu_kind() -> str | None:
    """Name of the default device, as "NVIDIA H200"; None where it is no GPU."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
