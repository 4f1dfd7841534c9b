"""Activation of the gate times up in one Pallas Mosaic GPU kernel (Hopper)."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.fused.fused_inputs import Activation, check_gate_up_inputs
from pallas_kernels.fused.mosaic_rows import (
    COMPILER_PARAMS,
    MAX_VECTOR,
    WARP_LANES,
    WARPS,
    check_model_dtype,
    interpret_option,
    load_sum,
    power_of_two_below,
    round_to,
    rows_layout,
)

MANY_TOKENS = 1024  # from here on, bandwidth counts and no longer a token's latency


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivationTuning:
    """Tile of a program.

    Attributes:
      rows: tokens, a power of two.
      columns: of the output, a multiple of 32; more than F is cut down.
    """

    rows: int
    columns: int

    def __post_init__(self):
        """Refuse tiles that no layout fits."""
        if self.rows < 1 or self.rows & (self.rows - 1) or self.columns % WARP_LANES:
            raise ValueError(
                "rows must be a power of two and columns a multiple of 32; "
                f"got {self.rows} and {self.columns}"
            )


@functools.partial(jax.jit, static_argnames=("activation", "dtype", "interpret", "tuning"))
def gated_activation(
    gate_up: jax.Array,
    *,
    activation: Activation,
    dtype: DTypeLike,
    interpret: Any = None,
    tuning: GatedActivationTuning | None = None,
) -> jax.Array:
    """Multiply the activated gate with up.

    Args:
      gate_up: [T, 2 * F] in `dtype`, the gate first; or float32[P, T, 2 * F] whose total over P is
        first rounded to `dtype`.
      activation: "silu", or "gelu_tanh" (GELU by its tanh approximation).
      dtype: bfloat16 or float16, of the model.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: None = chosen by the shape.

    Returns:
      [T, F] in `dtype`.

    Raises:
      ValueError: shapes or dtypes do not fit, or `fits_gated_activation` says no.
    """
    check_model_dtype("dtype", dtype)
    check_gate_up_inputs(gate_up, activation, dtype)
    T, F = gate_up.shape[-2], gate_up.shape[-1] // 2
    if not fits_gated_activation(F):
        raise ValueError(f"F must be a multiple of {MAX_VECTOR}, at least {WARP_LANES}; got {F}")
    tuning = tuning or choose_gated_activation_tuning(T)
    plan = _Plan(
        tokens=T,
        width=F,
        rows=min(tuning.rows, power_of_two_below(T)),
        columns=_columns(F, tuning.columns),
        activation=activation,
        dtype=jnp.dtype(dtype),
    )
    gate_up = gate_up.reshape(*gate_up.shape[:-1], 2, F)
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((T, F), plan.dtype),
        grid=(-(-T // plan.rows), -(-F // plan.columns)),
        grid_names=("row", "column"),
        compiler_params=COMPILER_PARAMS,
        **interpret_option(interpret),
    )
    return run(gate_up)


def fits_gated_activation(width: int) -> bool:
    """Whether the kernel takes an MLP of this hidden size."""
    return width % MAX_VECTOR == 0 and width >= WARP_LANES


def choose_gated_activation_tuning(num_tokens: int) -> GatedActivationTuning:
    """Small tiles for few tokens, so that all multiprocessors take part."""
    columns = WARP_LANES * MAX_VECTOR
    return GatedActivationTuning(
        rows=WARPS, columns=columns if num_tokens < MANY_TOKENS else 2 * columns
    )


def _columns(width: int, wanted: int) -> int:
    """Columns of a tile: the wanted ones, or as many of a smaller MLP as make whole loads."""
    if wanted <= width:
        return wanted
    return WARP_LANES * min(MAX_VECTOR, power_of_two_below(width // WARP_LANES))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Static numbers of one kernel."""

    tokens: int
    width: int
    rows: int
    columns: int
    activation: Activation
    dtype: Any


def _kernel(plan: _Plan, gate_up_ref: Any, out_ref: Any) -> None:
    """One tile; those at the ends start early enough to be full, and do a part twice."""
    layout = rows_layout(plan.rows, plan.columns, WARP_LANES)
    row = jnp.minimum(lax.axis_index("row") * plan.rows, plan.tokens - plan.rows)
    column = jnp.minimum(lax.axis_index("column") * plan.columns, plan.width - plan.columns)
    rows, columns = pl.ds(row, plan.rows), pl.ds(column, plan.columns)
    gate, up = (load_sum(gate_up_ref, (rows, i, columns), layout, plan.dtype) for i in range(2))
    activated = round_to(activate(plan.activation, gate), plan.dtype)
    out_ref[rows, columns] = (activated * up).astype(plan.dtype)


def activate(activation: Activation, x: jax.Array) -> jax.Array:
    """Both are x times a logistic: 0.5 * (1 + tanh(u)) is the logistic of 2 * u."""
    z = x
    if activation == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    # The square of a root is one instruction where a quotient takes many; exp may be infinite.
    root = lax.rsqrt(1 + jnp.exp(-z))
    return x * root * root
