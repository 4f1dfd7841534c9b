"""What JAX must be told before it starts: memory, compilation cache; and which device came."""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxserve.errors import EngineConfigError

logger = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = "~/.cache/jaxserve"
XLA_FOLDER = "xla"
"""Of JAX's own cache, inside the folder of the caches."""
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The variable from which XLA takes how many GiB of the host's memory it pins for each GPU."""
DEFAULT_PINNED_GIB = 64


def configure_jax(
    *, gpu_memory_utilization: float, pinned_bytes: int, compilation_cache_dir: str | None
) -> Path:
    """Set JAX's memory and compilation cache; call it before the first array is made.

    Where JAX already runs (a notebook), its memory pools are as they are: the engine then sizes
    itself by what is left, and says so.

    Args:
      gpu_memory_utilization: share of the device's memory.
      pinned_bytes: of the host's memory that one device copies from and to, at most.
      compilation_cache_dir: folder of the caches; None = the default one.

    Returns:
      The folder of the caches.
    """
    if not _backend_runs():
        share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        if share is None:
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{gpu_memory_utilization:.4f}"
        num_gib = pinned_bytes // 2**30 + 2  # some is lost between pages of several sizes
        if num_gib > DEFAULT_PINNED_GIB:
            os.environ.setdefault(PINNED_LIMIT, str(num_gib))
    else:
        logger.info("JAX runs already: the engine takes what is left of its memory pool")
    import jax

    folder = Path(compilation_cache_dir or DEFAULT_CACHE_DIR).expanduser()
    given = jax.config.jax_compilation_cache_dir
    if given and given != str(folder / XLA_FOLDER) and compilation_cache_dir is None:
        folder = Path(given)
    elif _is_usable(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder / XLA_FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def check_memory_pool(devices: Iterable[Any]) -> None:
    """Refuse a device whose memory JAX could not reserve: other processes hold the rest.

    JAX goes on with a smaller pool and does not say so, and the first large step would fail.

    Args:
      devices: on which something has been allocated already, since that reserves the pool.

    Raises:
      EngineConfigError: names how much there is.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        return
    for device in devices:
        stats = device.memory_stats() or {}
        wanted, reserved = stats.get("bytes_limit", 0), stats.get("pool_bytes", 0)
        if 0 < reserved < 0.98 * wanted:
            raise EngineConfigError(
                f"{device.device_kind} {device.id} must have {wanted / 2**30:.1f} GiB free for "
                f"gpu_memory_utilization; got {reserved / 2**30:.1f} GiB; end the processes that "
                f"hold the rest, or lower gpu_memory_utilization"
            )


def check_pinned_memory(num_bytes: int) -> None:
    """Refuse a host tier that XLA would not pin the memory for; pages would fail as they fill.

    Args:
      num_bytes: of the host tier, for one GPU.

    Raises:
      EngineConfigError: names the variable, which is read when JAX starts.
    """
    limit = int(os.environ.get(PINNED_LIMIT, DEFAULT_PINNED_GIB))
    if num_bytes > (limit - 1) * 2**30:  # one is for pages on their way
        raise EngineConfigError(
            f"kv_offloading_size must be at most {limit - 1} GiB for each GPU, one less than XLA "
            f"pins; got {num_bytes / 2**30:.2f} GiB for each; set {PINNED_LIMIT} before JAX starts"
        )


def _backend_runs() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # there is no public way to ask

    return xla_bridge.backends_are_initialized()


def _is_usable(folder: Path) -> bool:
    """Make the folder for this user alone: a cache of programs is code."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return True
        logger.warning("no compilation cache: %s must be this user's and writable", folder)
    except OSError as error:
        logger.warning("no compilation cache: %s", error)
    return False
