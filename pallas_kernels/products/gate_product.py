"""Gated activation and a product of few rows in one Pallas Mosaic GPU kernel (Hopper)."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.fused.fused_inputs import Activation, check_gate_up_inputs
from pallas_kernels.fused.gated_activation import activate
from pallas_kernels.fused.mosaic_rows import load_sum, round_to
from pallas_kernels.products.kept_rows import (
    THREADS,
    KeptRows,
    ProductPlan,
    Prologue,
    fill_share,
    fits_kept_rows,
)
from pallas_kernels.products.product_kernel import launch
from pallas_kernels.products.product_tuning import ProductTuningConfig
from pallas_kernels.products.skinny_product import check_product, fits_skinny_product, make_plan


@functools.partial(jax.jit, static_argnames=("activation", "transposed", "interpret", "tuning"))
def gate_product(
    gate_up: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    activation: Activation,
    transposed: bool = False,
    interpret: Any = None,
    tuning: ProductTuningConfig | None = None,
) -> jax.Array:
    """Multiply the activated gate with up, and the result by one layer's weight.

    Each thread block makes the part of K that its weights need, while they are on their way.

    Args:
      gate_up: [S, 2 * F] in the weights' dtype, the gate first; or float32[P, S, 2 * F] whose total
        over P is first rounded to it. S at most 8, F a multiple of 128.
      weights: [L, F, N] bfloat16 or float16, transposed [L, N, F]; N a multiple of 64.
      layer: int32[1], which weights to read.
      activation: "silu", or "gelu_tanh" (GELU by its tanh approximation).
      transposed: how the weights are stored.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = from the table.

    Returns:
      float32[P, S, N], whose sum over P is the product.

    Raises:
      ValueError: shapes or dtypes do not fit, or no tile of `tuning` does.
    """
    check_gate_up_inputs(gate_up, activation, weights.dtype)
    S, F = gate_up.shape[-2], gate_up.shape[-1] // 2
    check_product("gate_up", (S, F), weights.dtype, weights, transposed)
    if not fits_kept_rows(S, F):
        raise ValueError(f"S must be at most 8 and F a multiple of {THREADS}; got {S} and {F}")
    plan = make_plan((S, F), weights, transposed, "share", tuning, interpret)
    (sums,) = launch(plan, _GatedRows(activation), [gate_up], weights, layer, interpret)
    return sums


def fits_gate_product(
    x_shape: tuple[int, ...], weights_shape: tuple[int, ...], dtype: DTypeLike
) -> bool:
    """Whether `gate_product` takes a gate and an up of [S, F] each, and the weights [L, F, N]."""
    return fits_skinny_product(x_shape, weights_shape, dtype, transposed=False) and fits_kept_rows(
        *x_shape
    )


@dataclass(frozen=True)
class _GatedRows(Prologue):
    """The prologue."""

    activation: Activation

    def fill(
        self, plan: ProductPlan, x: KeptRows, arrays: Sequence[Any], outs: Sequence[Any],
        scratch: Any,
    ) -> None:  # fmt: skip
        """Gate what the share needs."""
        del outs, scratch
        (gate_up,) = arrays

        def load_gated(index, layout):
            row, place = index
            up_place = pl.ds(place.start + plan.depth, place.size)
            gate = load_sum(gate_up, (row, place), layout, plan.dtype)
            up = load_sum(gate_up, (row, up_place), layout, plan.dtype)
            return round_to(activate(self.activation, gate), plan.dtype) * up

        fill_share(plan, x, load_gated)
