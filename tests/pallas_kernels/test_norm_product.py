"""Norm and product of few rows: interpreted, lowered for CUDA, refused, and (mark gpu) run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused import xla_fused
from pallas_kernels.products.norm_product import fits_norm_product, norm_product
from tests.pallas_kernels.test_skinny_product import TWO_GROUPS, UNEVEN, assert_is_product, tuned

LAYER = jnp.array([1], jnp.int32)
# D, N of Qwen3-0.6B's and Llama-3-8B's qkv, and gate with up
REAL = [(1024, 4096), (1024, 6144), (4096, 6144), (4096, 28672)]
# rows, D, N, parts of the delta (0 = it is whole, None = there is none), transposed, tuning
CASES = [
    (1, 256, 192, 3, False, UNEVEN),
    (1, 384, 256, None, False, TWO_GROUPS),
    (3, 384, 192, 1, True, UNEVEN),
    (5, 1024, 128, 0, False, tuned(2, block_n=128)),
    (8, 1024, 256, 2, False, TWO_GROUPS),
]


def make_inputs(rows, depth, columns, parts, transposed, dtype="bfloat16"):
    """x, delta, gains, weights."""
    rng = np.random.default_rng(0)
    delta_shape = (parts, rows, depth) if parts else (rows, depth)
    stored = (columns, depth) if transposed else (depth, columns)
    delta = jnp.asarray(rng.standard_normal(delta_shape), "float32" if parts else dtype)
    return (
        jnp.asarray(rng.standard_normal((rows, depth)), dtype),
        None if parts is None else delta,
        jnp.asarray(rng.standard_normal((2, depth)), dtype),
        jnp.asarray(rng.standard_normal((3, *stored)), dtype),
    )


@pytest.mark.parametrize(("rows", "depth", "columns", "parts", "transposed", "tuning"), CASES)
def test_interpreted_kernel_is_the_norm_and_then_the_product(
    rows, depth, columns, parts, transposed, tuning
):
    x, delta, gains, weights = make_inputs(rows, depth, columns, parts, transposed)
    options: dict[str, Any] = {"eps": 1e-5, "gain_offset": 1.0}
    residual, got = norm_product(
        x, delta, gains, LAYER, weights, LAYER, transposed=transposed, tuning=tuning,
        interpret=plgpu.InterpretGPUParams(), **options,
    )  # fmt: skip
    want_residual, normed = xla_fused.add_norm(x, delta, gains, LAYER, **options)
    np.testing.assert_array_equal(residual, want_residual)
    assert got.shape[1:] == (rows, columns)
    assert_is_product(got, normed, weights, transposed)


def test_interpreted_float16():
    x, delta, gains, weights = make_inputs(2, 256, 64, 2, False, "float16")
    residual, got = norm_product(
        x, delta, gains, LAYER, weights, LAYER, eps=1e-6, interpret=plgpu.InterpretGPUParams()
    )
    assert residual.dtype == jnp.float16
    _, normed = xla_fused.add_norm(x, delta, gains, LAYER, eps=1e-6)
    assert_is_product(got, normed, weights, False)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("depth", "columns"), REAL)
def test_real_shapes_lower_for_cuda_as_one_kernel(depth, columns, rows):
    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    index = array(1, dtype="int32")
    args = [array(rows, depth), array(6, rows, depth, dtype="float32"), array(2, depth), index]
    run = jax.jit(functools.partial(norm_product, eps=1e-6))
    traced = run.trace(*args, array(2, depth, columns), index)
    assert traced.out_info[1].shape[1:] == (rows, columns)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert fits_norm_product((rows, depth), (2, depth, columns), jnp.bfloat16)


@pytest.mark.parametrize(("rows", "depth"), [(9, 256), (1, 192), (1, 8320)])
def test_what_does_not_fit_is_refused(rows, depth):
    x, delta, gains, weights = make_inputs(rows, depth, 64, 1, False)
    assert not fits_norm_product(x.shape, weights.shape, x.dtype)
    with pytest.raises(ValueError, match="S must be at most 8 and D a multiple of 128 up to 8192"):
        norm_product(x, delta, gains, LAYER, weights, LAYER, eps=1e-5)


def test_shapes_that_disagree_are_refused():
    x, delta, gains, weights = make_inputs(2, 256, 64, 2, False)
    with pytest.raises(ValueError, match=r"gains must be \[any, 256\]"):
        norm_product(x, delta, gains[:, :128], LAYER, weights, LAYER, eps=1e-5)
    assert delta is not None
    with pytest.raises(ValueError, match="delta must be"):
        norm_product(x, delta[..., :128], gains, LAYER, weights, LAYER, eps=1e-5)
    with pytest.raises(ValueError, match="x and weights must have one dtype"):
        norm_product(x, delta, gains, LAYER, weights.astype("float16"), LAYER, eps=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("depth", "columns"), REAL[:3])
def test_kernel_on_a_gpu_is_the_norm_and_then_the_product(depth, columns, rows):
    x, delta, gains, weights = make_inputs(rows, depth, columns, 6, False)
    residual, got = norm_product(x, delta, gains, LAYER, weights, LAYER, eps=1e-5)
    want_residual, normed = xla_fused.add_norm(x, delta, gains, LAYER, eps=1e-5)
    want = jnp.dot(normed, weights[1], preferred_element_type=jnp.float32)
    error = jnp.linalg.norm(got.sum(0) - want) / jnp.linalg.norm(want)
    assert error < 5e-3  # a norm may be rounded the other way
    np.testing.assert_allclose(
        np.asarray(residual, np.float32), np.asarray(want_residual, np.float32), rtol=1e-2
    )
