"""What the callers of Triton kernels share: packages imported late, the call, and checks."""

import importlib
import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

STORED_HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 64


def import_jax_triton() -> ModuleType:
    """The package jax_triton, which stands beside a CUDA jax only.

    Raises:
      ValueError: it, triton or jax's CUDA plugin is missing, or they do not fit each other.
    """
    try:
        importlib.import_module("triton")
        return importlib.import_module("jax_triton")
    except (ImportError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            "attention backend triton must have jax-triton and a triton that fits it; "
            f"got {type(error).__name__}: {reason}; "
            "install them: pip install 'jax-triton>=0.3.1,<0.5'"
        ) from error


def launch(*inputs: jax.Array | int, kernel: Any, out: Any, **options: Any) -> Any:
    """Call a Triton kernel, whose pointers are those of the inputs, then those of the outputs.

    Args:
      inputs: arrays, and int32 scalars.
      kernel: decorated with `triton.jit`.
      out: shapes and dtypes of the outputs.
      options: grid, num_warps, num_stages, and the kernel's constants.

    Returns:
      The outputs, as `out`.
    """
    if passes_aliased_outputs():
        options |= dict(out_shape=out)
    else:
        options |= dict(out_type=out, backend_options={"enable_fp_fusion": True})
    return import_jax_triton().triton_call(*inputs, kernel=kernel, **options)


def passes_aliased_outputs() -> bool:
    """Whether outputs that alias inputs get pointers of their own: so in jax-triton before 0.4."""
    parameters = inspect.signature(import_jax_triton().triton_call).parameters
    return "out_type" not in parameters


def check_triton_inputs(q: jax.Array, k_pages: jax.Array) -> None:
    """Refuse what the Triton attention kernels cannot read.

    Raises:
      ValueError: dtype, head dim or heads a KV head.
    """
    _, _, _, num_kv_heads, head_dim = k_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype:
        raise ValueError(
            "q and pages must both be bfloat16 or both float16; "
            f"got {q.dtype} and {k_pages.dtype}; use the xla backend"
        )
    if head_dim not in STORED_HEAD_DIMS:
        raise ValueError(f"stored head dim must be one of {STORED_HEAD_DIMS}; got {head_dim}")
    group = q.shape[1] // num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(f"query heads a KV head must be at most {MAX_GROUP}; got {group}")
