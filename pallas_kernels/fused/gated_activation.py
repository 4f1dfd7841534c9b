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
    layer_index,
    load,
    load_sum,
    over_rows,
    power_of_two_below,
    round_to,
    rows_layout,
    weights_first,
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


@functools.partial(
    jax.jit, static_argnames=("activation", "dtype", "dependent_launch", "interpret", "tuning")
)
def gated_activation(
    gate_up: jax.Array,
    *,
    activation: Activation,
    dtype: DTypeLike,
    bias: jax.Array | None = None,
    layer: jax.Array | None = None,
    dependent_launch: bool = False,
    interpret: Any = None,
    tuning: GatedActivationTuning | None = None,
) -> jax.Array:
    """Multiply the activated gate with up.

    Args:
      gate_up: [T, 2 * F] in `dtype`, the gate first; or float32[P, T, 2 * F] whose total over P is
        first rounded to `dtype`.
      activation: "silu", or "gelu_tanh" (GELU by its tanh approximation).
      dtype: bfloat16 or float16, of the model.
      bias: [L, 2 * F] in `dtype`, of all layers, added first.
      layer: int32[1], which bias to read; comes with a bias only.
      dependent_launch: start while the kernel before is still running, and wait for it.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: None = chosen by the shape.

    Returns:
      [T, F] in `dtype`.

    Raises:
      ValueError: shapes or dtypes do not fit, or `fits_gated_activation` says no.
    """
    check_model_dtype("dtype", dtype)
    check_gate_up_inputs(gate_up, activation, dtype, bias, layer)
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
        dependent_launch=dependent_launch,
    )
    gate_up = gate_up.reshape(*gate_up.shape[:-1], 2, F)
    inputs = () if bias is None else (bias.reshape(-1, 2, F), layer)
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((T, F), plan.dtype),
        grid=(-(-T // plan.rows), -(-F // plan.columns)),
        grid_names=("row", "column"),
        compiler_params=COMPILER_PARAMS,
        **interpret_option(interpret),
    )
    return run(gate_up, *inputs)


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
    dependent_launch: bool


def _kernel(plan: _Plan, gate_up_ref: Any, *refs: Any) -> None:
    """One tile; those at the ends start early enough to be full, and do a part twice."""
    *bias_refs, out_ref = refs
    layout = rows_layout(plan.rows, plan.columns, WARP_LANES)
    row = jnp.minimum(lax.axis_index("row") * plan.rows, plan.tokens - plan.rows)
    column = jnp.minimum(lax.axis_index("column") * plan.columns, plan.width - plan.columns)
    rows, columns = pl.ds(row, plan.rows), pl.ds(column, plan.columns)
    load_biases = weights_first(
        plan.dependent_launch, functools.partial(_load_biases, plan, bias_refs, columns, layout)
    )
    halves = [load_sum(gate_up_ref, (rows, i, columns), layout, plan.dtype) for i in range(2)]
    for i, bias in enumerate(load_biases()):
        halves[i] = round_to(halves[i] + bias, plan.dtype)
    gate, up = halves
    activated = round_to(_activate(plan.activation, gate), plan.dtype)
    out_ref[rows, columns] = (activated * up).astype(plan.dtype)


def _load_biases(plan: _Plan, refs: list[Any], columns: Any, layout: Any) -> list[jax.Array]:
    """float32[rows, columns] of gate and up; nothing where there is no bias."""
    if not refs:
        return []
    bias_ref, layer_ref = refs
    layer = layer_index(layer_ref, bias_ref)
    return [
        over_rows(load(bias_ref.at[layer, i, columns], layout.reduce((0,))), plan.rows, layout)
        for i in range(2)
    ]


def _activate(activation: Activation, x: jax.Array) -> jax.Array:
    """Both are x times a logistic: 0.5 * (1 + tanh(u)) is the logistic of 2 * u."""
    z = x
    if activation == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    # The square of a root is one instruction where a quotient takes many; exp may be infinite.
    root = lax.rsqrt(1 + jnp.exp(-z))
    return x * root * root
