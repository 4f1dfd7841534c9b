"""Gate and product of few rows: interpreted, lowered for CUDA, refused, and (mark gpu) run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.gated_activation import gated_activation
from pallas_kernels.products.gate_product import fits_gate_product, gate_product
from tests.pallas_kernels.test_skinny_product import TWO_GROUPS, UNEVEN, assert_is_product, tuned

LAYER = jnp.array([1], jnp.int32)
INTERPRET = plgpu.InterpretGPUParams()
# F, D of Qwen3-0.6B and Llama-3-8B
REAL = [(3072, 1024), (14336, 4096)]
# rows, F, D, parts (0 = the sum is whole), transposed, activation, tuning
CASES = [
    (1, 256, 192, 3, False, "silu", UNEVEN),
    (1, 384, 256, 0, False, "gelu_tanh", TWO_GROUPS),
    (3, 384, 192, 1, True, "silu", UNEVEN),
    (5, 1024, 128, 2, False, "silu", tuned(11, block_n=64)),  # shares go on at the start of F
    (8, 1024, 256, 2, False, "gelu_tanh", TWO_GROUPS),
]


def make_inputs(rows, width, columns, parts, transposed, dtype="bfloat16"):
    """gate_up, weights."""
    rng = np.random.default_rng(0)
    shape = (parts, rows, 2 * width) if parts else (rows, 2 * width)
    stored = (columns, width) if transposed else (width, columns)
    return (
        jnp.asarray(rng.standard_normal(shape), "float32" if parts else dtype),
        jnp.asarray(rng.standard_normal((3, *stored)), dtype),
    )


@pytest.mark.parametrize(
    ("rows", "width", "columns", "parts", "transposed", "activation", "tuning"), CASES
)
def test_interpreted_kernel_is_the_gate_and_then_the_product(
    rows, width, columns, parts, transposed, activation, tuning
):
    gate_up, weights = make_inputs(rows, width, columns, parts, transposed)
    got = gate_product(
        gate_up, weights, LAYER, activation=activation, transposed=transposed, tuning=tuning,
        interpret=INTERPRET,
    )  # fmt: skip
    assert got.shape[1:] == (rows, columns)
    gated = gated_activation(gate_up, activation=activation, dtype="bfloat16", interpret=INTERPRET)
    assert_is_product(got, gated, weights, transposed)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("width", "columns"), REAL)
def test_real_shapes_lower_for_cuda_as_one_kernel(width, columns, rows):
    gate_up = jax.ShapeDtypeStruct((3, rows, 2 * width), "float32")
    weights = jax.ShapeDtypeStruct((2, width, columns), "bfloat16")
    run = jax.jit(functools.partial(gate_product, activation="silu"))
    traced = run.trace(gate_up, weights, jax.ShapeDtypeStruct((1,), "int32"))
    assert traced.out_info.shape[1:] == (rows, columns)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert fits_gate_product((rows, width), weights.shape, jnp.bfloat16)


@pytest.mark.parametrize(("rows", "width"), [(9, 256), (1, 192)])
def test_what_does_not_fit_is_refused(rows, width):
    gate_up, weights = make_inputs(rows, width, 64, 1, False)
    assert not fits_gate_product((rows, width), weights.shape, weights.dtype)
    with pytest.raises(ValueError, match="S must be at most 8 and F a multiple of 128"):
        gate_product(gate_up, weights, LAYER, activation="silu")


def test_shapes_that_disagree_are_refused():
    gate_up, weights = make_inputs(2, 256, 64, 2, False)
    with pytest.raises(ValueError, match="with x's K 128; got"):
        gate_product(gate_up[..., :256], weights, LAYER, activation="silu")
    with pytest.raises(ValueError, match="as much gate as up"):
        gate_product(gate_up[..., :511], weights, LAYER, activation="silu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("width", "columns"), REAL)
def test_kernel_on_a_gpu_is_the_gate_and_then_the_product(width, columns, rows):
    gate_up, weights = make_inputs(rows, width, columns, 3, False)
    got = gate_product(gate_up, weights, LAYER, activation="silu")
    gated = gated_activation(gate_up, activation="silu", dtype="bfloat16")
    want = jnp.dot(gated, weights[1], preferred_element_type=jnp.float32)
    assert jnp.linalg.norm(got.sum(0) - want) / jnp.linalg.norm(want) < 1e-3
