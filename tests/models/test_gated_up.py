"""Many rows of an MLP are multiplied and gated in one kernel, where one takes them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType

from models import products
from models.invariant_kernels import invariant_kernels
from models.kernels import ModelKernels, model_kernels
from models.layer_slice import LayerSlice
from models.layers import GatedMLP, OffsetRMSNorm, RMSNorm
from models.products import (
    MAX_SKINNY_BYTES,
    MAX_SKINNY_ROWS,
    MIN_GATED_ROWS,
    MIN_GATED_ROWS_AT_ONCE,
    multiply_and_gate,
)
from models.products import MIN_GATED_ROWS_OF_SMALL as MANY_ROWS
from pallas_kernels.products import gated_product

D, F = 256, 512
ON_GPU = model_kernels("mosaic", "gpu")


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(
    kernels: ModelKernels,
    rows: int,
    *,
    depth: int = D,
    width: int = F,
    bias: bool = False,
    num_layers: int = 0,
) -> str:
    """An MLP for CUDA; its weights are a layer of a stack, or arrays of their own."""

    def run(x, delta, gate_up, down):
        norm = RMSNorm(depth, eps=1e-6, dtype="bfloat16", kernels=kernels)
        mlp = GatedMLP(depth, width, dtype="bfloat16", kernels=kernels, bias=bias)
        if num_layers:
            gate_up, down = (LayerSlice.of_layer(stack, 1) for stack in (gate_up, down))
        vars(mlp.gate_up_proj)["weight"].set_value(gate_up)
        vars(mlp.down_proj)["weight"].set_value(down)
        return mlp(x, delta, norm)

    stack = (num_layers,) if num_layers else ()
    weights = array(*stack, depth, 2, width), array(*stack, width, depth)
    traced = jax.jit(run).trace(array(rows, depth), array(rows, depth), *weights)
    residual, down = traced.out_info
    assert residual.shape == down.shape[-2:] == (rows, depth)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def facts(text: str, rows: int, width: int = F) -> tuple[int, bool]:
    """Number of Mosaic kernels, and whether gate and up are ever an array."""
    whole = (f"<{rows}x2x{width}x", f"<{rows}x{2 * width}x")
    return text.count("custom_call @mosaic_gpu"), any(shape in text for shape in whole)


@pytest.mark.parametrize("num_layers", [0, 3])
def test_many_rows_leave_no_gate_kernel_and_no_gate_and_up(num_layers):
    text = lower(ON_GPU, MANY_ROWS, num_layers=num_layers)
    assert facts(text, MANY_ROWS) == (2, False)  # the norm, and the gated product
    if num_layers:  # which reads its layer in place
        assert f"x{D}x{2 * F}xbf16>, tensor<1xi32>) -> tensor<{MANY_ROWS}x{F}xbf16>" in text


def test_few_rows_do_so_with_a_large_weight():
    width = MAX_SKINNY_BYTES // (4 * D) + 64  # down is the skinny kernel's
    assert facts(lower(ON_GPU, MIN_GATED_ROWS, width=width), MIN_GATED_ROWS, width) == (3, False)
    fewer = MIN_GATED_ROWS - 1
    assert facts(lower(ON_GPU, fewer, width=width), fewer, width)[1]


@pytest.mark.parametrize(("rows", "num_products"), [(128, 1), (256, 1), (512, 2)])
def test_rows_whose_tiles_all_run_at_once_do_so_with_a_small_weight(rows, num_products):
    width = 3072
    text = lower(ON_GPU, rows, depth=1024, width=width)
    assert text.count("stablehlo.dot_general") == num_products  # XLA's: down, or gate and up, too
    assert facts(text, rows, width) == (2, num_products == 2)


def test_fewer_rows_of_a_small_weight_stay_with_the_skinny_kernel():
    few = MIN_GATED_ROWS_AT_ONCE - 1
    assert facts(lower(ON_GPU, few), few)[0] == 4  # norm, gate and up, the gate of it, down
    text = lower(ON_GPU, MIN_GATED_ROWS_AT_ONCE)
    assert facts(text, MIN_GATED_ROWS_AT_ONCE) == (3, False)
    assert facts(lower(ON_GPU, MAX_SKINNY_ROWS + 8), MAX_SKINNY_ROWS + 8) == (2, False)


@pytest.mark.parametrize(
    ("rows", "options"),
    [(MANY_ROWS - 8, {"width": 2 * F}), (MANY_ROWS, {"bias": True}), (MANY_ROWS, {"width": 96})],
)
def test_other_rows_and_weights_keep_norm_product_and_gate(rows, options):
    width = options.get("width", F)
    text = lower(ON_GPU, rows, **options)
    assert facts(text, rows, width) == (2, True)  # the norm, and the gate


def test_only_one_device_of_the_usual_mode_does_so():
    axis_types = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=axis_types)
    assert ON_GPU.gated_up is not None
    for kernels in (
        model_kernels("mosaic", "gpu", mesh),
        model_kernels("xla", "cpu"),
        model_kernels("triton", "gpu"),
        invariant_kernels(),
    ):
        assert kernels.gated_up is None
        weight = LayerSlice.of_layer(jnp.zeros((1, D, 2, F), jnp.bfloat16), 0)
        assert not kernels.fits_gated_up(jnp.zeros((MANY_ROWS, D), jnp.bfloat16), weight)


def run_mlp(kernels: ModelKernels) -> list[np.ndarray]:
    """Residual and product of 24 rows; what is added to the residual has a norm of its own."""
    rng = np.random.default_rng(0)

    def random(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

    norm, delta_norm = (
        OffsetRMSNorm(D, eps=1e-6, dtype="bfloat16", kernels=kernels) for _ in range(2)
    )
    mlp = GatedMLP(D, F, dtype="bfloat16", kernels=kernels, bias=False, activation="gelu_tanh")
    for layer in (norm, delta_norm):
        layer.weight.set_value(random(D, scale=0.5))
    vars(mlp.gate_up_proj)["weight"].set_value(random(D, 2, F, scale=D**-0.5))
    vars(mlp.down_proj)["weight"].set_value(random(F, D, scale=F**-0.5))
    x, delta = random(24, D), random(24, D, scale=3.0)
    return [np.asarray(out, np.float32) for out in mlp(x, delta, norm, delta_norm)]


def test_the_kernel_gives_the_numbers_of_norm_product_and_gate(monkeypatch):
    by_xla = model_kernels("xla", "cpu")
    want = run_mlp(by_xla)
    calls = []

    def interpreted(*args, **options):
        calls.append(args)
        return by_kernel(*args, **options)

    by_kernel = functools.partial(gated_product.gated_product, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(gated_product, "gated_product", interpreted)
    monkeypatch.setattr(products, "MIN_GATED_ROWS_AT_ONCE", 8)
    residual, product = run_mlp(replace(by_xla, gated_up=multiply_and_gate))
    assert len(calls) == 1
    np.testing.assert_array_equal(residual, want[0])
    assert np.linalg.norm(product - want[1]) < 1e-2 * np.linalg.norm(want[1])
