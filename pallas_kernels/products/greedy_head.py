"""Hidden states times the output head, of which each row keeps its highest logit (Hopper).

Greedy decode steps need no more, so no logits are written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.products.greedy_head_kernel import launch
from pallas_kernels.products.greedy_head_plan import (
    BLOCK_K,
    COLUMN_TILES,
    GreedyHeadPlan,
    GreedyHeadTuning,
)
from pallas_kernels.sampling.first_highest import first_highest

_DTYPES = (jnp.bfloat16, jnp.float16)
_ROW_MULTIPLE = 8  # of both, in shared memory
_MIN_VOCABULARY = min(COLUMN_TILES)


@functools.partial(jax.jit, static_argnames=("interpret", "tuning"))
def greedy_head(
    hidden: jax.Array,
    head: jax.Array,
    *,
    interpret: Any = None,
    tuning: GreedyHeadTuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each row's highest logit, and the first column that has it.

    Logits are float32 sums that are never rounded to the dtype of what is multiplied.

    Args:
      hidden: [S, D] bfloat16 or float16; D a multiple of 64. Only where S is no multiple of 8 are
        hidden states copied.
      head: [V, D] in hidden's dtype; V a multiple of 8, at least 128.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = the default ones.

    Returns:
      float32[S], NaN where a row has a NaN logit, and int32[S], which is then any column.

    Raises:
      ValueError: shapes or dtypes do not fit, or the tuning does not fit them.
    """
    if hidden.dtype != head.dtype:
        raise ValueError(f"hidden and head must have one dtype; got {hidden.dtype}, {head.dtype}")
    refusal = _refusal(hidden.shape, head.shape, hidden.dtype)
    if refusal is not None:
        raise ValueError(refusal)
    num_rows, depth = hidden.shape
    if num_rows % _ROW_MULTIPLE:
        hidden = jnp.pad(hidden, ((0, -num_rows % _ROW_MULTIPLE), (0, 0)))
    plan = GreedyHeadPlan(
        rows=hidden.shape[0],
        depth=depth,
        vocabulary=head.shape[0],
        dtype=hidden.dtype,
        tuning=tuning or GreedyHeadTuning(),
    )
    logits, columns = launch(plan, hidden, head, interpret)
    return first_highest(logits[:num_rows], columns[:num_rows])


def fits_greedy_head(
    hidden_shape: tuple[int, ...], head_shape: tuple[int, ...], dtype: DTypeLike
) -> bool:
    """Whether `greedy_head` takes hidden [S, D] and head [V, D] of this dtype."""
    return _refusal(hidden_shape, head_shape, dtype) is None


def _refusal(
    hidden_shape: tuple[int, ...], head_shape: tuple[int, ...], dtype: DTypeLike
) -> str | None:
    """Why the kernel does not take arrays; None where it does."""
    if jnp.dtype(dtype) not in _DTYPES:
        return f"hidden must be bfloat16 or float16; got {jnp.dtype(dtype).name}"
    if len(hidden_shape) != 2 or len(head_shape) != 2 or hidden_shape[1] != head_shape[1]:
        return f"hidden must be [S, D] and head [V, D]; got {hidden_shape} and {head_shape}"
    rows, depth = hidden_shape
    if not rows:
        return "hidden must have at least 1 row; got 0"
    vocabulary = head_shape[0]
    if not depth or depth % BLOCK_K or vocabulary < _MIN_VOCABULARY or vocabulary % _ROW_MULTIPLE:
        return (
            f"D must be a multiple of {BLOCK_K}, and V of {_ROW_MULTIPLE} and at least "
            f"{_MIN_VOCABULARY}; got {depth} and {vocabulary}"
        )
    return None
