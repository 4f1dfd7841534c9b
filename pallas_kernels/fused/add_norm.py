"""Residual sum and RMSNorm in one Pallas Mosaic GPU kernel (Hopper)."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.fused_inputs import check_shape, check_sum
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
    over_columns,
    over_rows,
    power_of_two_below,
    round_to,
    rows_layout,
    vector_length,
)

MAX_WIDTH = 16384
MAX_ODD_WIDTH = 4096  # of rows that one warp must hold, since a warpgroup cannot share them
MANY_TOKENS = 1024  # from here on, bandwidth counts and no longer a token's latency


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormTuning:
    """How tokens are shared out.

    Attributes:
      warpgroups: that share one token; 0 = each warp has a token of its own.
    """

    warpgroups: int


@functools.partial(jax.jit, static_argnames=("eps", "gain_offset", "interpret", "tuning"))
def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    gains: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    gain_offset: float = 0.0,
    delta_gains: jax.Array | None = None,
    interpret: Any = None,
    tuning: AddNormTuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add a product's result to the residual, and normalise the sum.

    Args:
      x: [T, D] bfloat16 or float16, the residual.
      delta: [T, D] in x's dtype, or float32[P, T, D] whose total over P is first rounded to x's
        dtype; None = the residual stays as it is.
      gains: [L, D], of all layers.
      layer: int32[1], which gains to read.
      eps: added to the mean square.
      gain_offset: added to the gains in float32 (Gemma: 1).
      delta_gains: [L, D]; delta is itself normalised by them before it is added (Gemma 2).
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: None = chosen by the shape.

    Returns:
      `x + delta` (x itself without a delta) and its norm, both [T, D] in x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or `fits_add_norm` says no.
    """
    T, D = x.shape
    check_model_dtype("x", x.dtype)
    check_shape("gains", gains, (None, D))
    if not fits_add_norm(D):
        raise ValueError(
            f"D must be a multiple of 128 up to {MAX_WIDTH} or of 32 up to {MAX_ODD_WIDTH}; got {D}"
        )
    tuning = tuning or choose_add_norm_tuning(T, D)
    if tuning.warpgroups and D % (WARPS * WARP_LANES * tuning.warpgroups):
        raise ValueError(f"warpgroups must share D={D} evenly; got {tuning.warpgroups}")
    if delta is not None:
        check_sum("delta", delta, D, x.dtype)
    if delta_gains is not None:
        check_shape("delta_gains", delta_gains, (gains.shape[0], D))
        if delta is None:
            raise ValueError("delta_gains must come with a delta; got None")
    plan = _Plan(
        tokens=T,
        width=D,
        warpgroups=tuning.warpgroups,
        eps=eps,
        gain_offset=gain_offset,
        dtype=x.dtype,
        has_delta=delta is not None,
        has_delta_gains=delta_gains is not None,
    )
    arrays = [array for array in (x, delta, gains, delta_gains) if array is not None]
    outs = _launch(plan, arrays, layer, interpret)
    return (x if delta is None else outs[0]), outs[-1]


def fits_add_norm(width: int) -> bool:
    """Whether the kernel takes rows of this width."""
    largest = MAX_WIDTH if width % (WARPS * WARP_LANES) == 0 else MAX_ODD_WIDTH
    return width % WARP_LANES == 0 and 0 < width <= largest


def choose_add_norm_tuning(num_tokens: int, width: int) -> AddNormTuning:
    """Few tokens: as many threads a token as have wide loads; many: enough to hold the row."""
    threads = WARPS * WARP_LANES
    counts = [count for count in range(1, 9) if width % (threads * count) == 0]
    if not counts or (num_tokens >= MANY_TOKENS and width <= threads * MAX_VECTOR):
        return AddNormTuning(warpgroups=0)
    if num_tokens >= MANY_TOKENS:
        enough = [count for count in counts if width <= 40 * threads * count]
        return AddNormTuning(warpgroups=(enough or counts[-1:])[0])
    return AddNormTuning(
        warpgroups=max(counts, key=lambda n: (vector_length(width // (threads * n)), n))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Static numbers of one kernel; `warpgroups` as in AddNormTuning."""

    tokens: int
    width: int
    warpgroups: int
    eps: float
    gain_offset: float
    dtype: Any
    has_delta: bool
    has_delta_gains: bool

    @property
    def rows(self) -> int:
        """Rows of the registers of one warpgroup: tokens, or parts of one token."""
        return WARPS if self.warpgroups else min(WARPS, power_of_two_below(self.tokens))

    @property
    def columns(self) -> int:
        return self.width // (WARPS * self.warpgroups) if self.warpgroups else self.width

    @property
    def parts(self) -> tuple[int, ...]:
        """How each array's last axis is cut."""
        return (WARPS * self.warpgroups, self.columns) if self.warpgroups else (self.width,)


def _launch(plan: _Plan, arrays: list[jax.Array], layer: jax.Array, interpret: Any):
    """Run the kernel: [x + delta, norm], or [norm] where there is no delta."""
    shape = (plan.tokens, plan.width)
    arrays = [array.reshape(*array.shape[:-1], *plan.parts) for array in arrays]
    out = jax.ShapeDtypeStruct((plan.tokens, *plan.parts), plan.dtype)
    warpgroups = max(1, plan.warpgroups)
    scratch: list[Any] = []
    if plan.warpgroups:
        sums = plgpu.SMEM((WARPS * warpgroups,), jnp.float32)
        barrier = plgpu.Barrier(num_arrivals=warpgroups) if warpgroups > 1 else None
        scratch = [[(sums, barrier)] * (1 + plan.has_delta_gains)]
    run = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=[out] * (1 + plan.has_delta),
        scratch_types=scratch,
        grid=(plan.tokens if plan.warpgroups else -(-plan.tokens // plan.rows),),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        **interpret_option(interpret),
    )
    return [out.reshape(shape) for out in run(*arrays, layer)]


def _kernel(plan: _Plan, x_ref: Any, *others: Any) -> None:
    """Load, sum, normalise and store; one token a program, or one a warp."""
    refs = list(others)
    exchange = refs.pop() if plan.warpgroups else [None, None]
    delta_ref = refs.pop(0) if plan.has_delta else None
    gains_ref = refs.pop(0)
    delta_gains_ref = refs.pop(0) if plan.has_delta_gains else None
    layer_ref, *outs = refs
    layout = rows_layout(plan.rows, plan.columns, WARP_LANES)
    index, layer = _index(plan), layer_index(layer_ref, gains_ref)
    y = load(x_ref.at[index], layout)
    delta = None if delta_ref is None else load_sum(delta_ref, index, layout, plan.dtype)
    gains, delta_gains = _load_gains(plan, (gains_ref, delta_gains_ref), layer, layout)
    if delta is not None:
        if delta_gains is not None:
            delta = round_to(_normalise(plan, delta, delta_gains, exchange[1], layout), plan.dtype)
        y = round_to(y + delta, plan.dtype)
        outs[0][index] = y.astype(plan.dtype)
    outs[-1][index] = _normalise(plan, y, gains, exchange[0], layout).astype(plan.dtype)


def _index(plan: _Plan) -> tuple[Any, ...]:
    """What of [T, D], cut into `parts`, is this warpgroup's."""
    program, columns = lax.axis_index("program"), pl.ds(0, plan.columns)
    if plan.warpgroups:
        return program, pl.ds(lax.axis_index("wg") * WARPS, WARPS), columns
    # The last program starts early enough to be full; what it does twice has the same result.
    first = jnp.minimum(program * plan.rows, plan.tokens - plan.rows)
    return pl.ds(first, plan.rows), columns


def _load_gains(plan: _Plan, refs: tuple[Any, Any], layer: jax.Array, layout: Any) -> list[Any]:
    """float32[rows, columns] of each; None where there is no reference."""
    return [None if ref is None else _load_gain(plan, ref, layer, layout) for ref in refs]


def _load_gain(plan: _Plan, ref: Any, layer: jax.Array, layout: Any) -> jax.Array:
    if plan.warpgroups:
        place = pl.ds(lax.axis_index("wg") * WARPS, WARPS)
        return load(ref.at[layer, place], layout) + plan.gain_offset
    gains = load(ref.at[layer], layout.reduce((0,))) + plan.gain_offset
    return over_rows(gains, plan.rows, layout)


def _normalise(plan: _Plan, y: jax.Array, gains: jax.Array, exchange: Any, layout: Any):
    """RMSNorm of float32[rows, columns], the rows of one token together where it has several."""
    total = jnp.sum(y * y, axis=1)
    if exchange is None:
        scale = lax.rsqrt(total / plan.width + plan.eps)
        return y * over_columns(scale, plan.columns, layout) * gains
    sums, barrier = exchange
    sums[pl.ds(lax.axis_index("wg") * WARPS, WARPS)] = total
    if barrier is None:
        plgpu.commit_smem()
    else:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
    whole = sums[0]
    for part in range(1, WARPS * plan.warpgroups):
        whole += sums[part]
    return y * lax.rsqrt(whole / plan.width + plan.eps) * gains
