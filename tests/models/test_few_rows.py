"""Few rows: products begin with the norm or the gate before them; which steps attention fits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from models import few_rows
from models.kernels import ModelKernels, model_kernels
from models.kv_cache import CacheGeometry
from models.layer_slice import LayerSlice

D, OUT = 256, (2, 64)
ON_GPU = model_kernels("mosaic", "gpu")
BY_XLA = model_kernels("xla", "cpu")


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function, *args):
    """Number of Mosaic kernels for CUDA, and what comes out."""
    traced = jax.jit(function).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu"), jax.tree.leaves(traced.out_info)


def norm_product(kernels: ModelKernels, *, with_delta_gains: bool = False):
    def run(x, delta, gains, weights):
        gains = LayerSlice.of_layer(gains, 1)
        delta_gains = gains if with_delta_gains else None
        weight = LayerSlice.of_layer(weights, 2)
        return kernels.norm_product(x, delta, gains, delta_gains, weight, eps=1e-6, gain_offset=1.0)

    return run


@pytest.mark.parametrize(
    ("rows", "with_delta_gains", "num_kernels"), [(1, False, 1), (1, True, 2), (8, False, 2)]
)
def test_one_row_is_normalised_within_its_product(rows, with_delta_gains, num_kernels):
    arrays = (array(rows, D), array(3, rows, D, dtype="float32"), array(2, D), array(3, D, *OUT))
    run = norm_product(ON_GPU, with_delta_gains=with_delta_gains)
    found, (residual, product) = lower(run, *arrays)
    assert found == num_kernels
    assert residual.shape == (rows, D)
    assert product.shape[1:] == (rows, *OUT)


@pytest.mark.parametrize(("rows", "width", "num_kernels"), [(1, 256, 1), (1, 192, 2), (8, 256, 2)])
def test_one_row_is_gated_within_its_product(rows, width, num_kernels):
    def run(gate_up, weights):
        weight = LayerSlice.of_layer(weights, 1)
        return ON_GPU.gate_product(gate_up, weight, dtype=jnp.bfloat16, activation="silu")

    gate_up = array(2, rows, 2, width, dtype="float32")
    found, (product,) = lower(run, gate_up, array(2, width, D))
    assert found == num_kernels
    assert product.shape[1:] == (rows, D)


def test_weights_that_xla_multiplies_faster_are_left_to_it():
    large = array(1, 4096, 6144)
    found, _ = lower(norm_product(ON_GPU), array(1, 4096), None, array(2, 4096), large)
    assert found == 1  # the norm


@pytest.mark.parametrize(
    ("num_pages", "window", "fits"),
    [(128, None, True), (129, None, False), (129, 2048, True), (129, 2049, False)],
)
def test_attention_is_fused_while_a_query_sees_few_tokens(num_pages, window, fits):
    qkv: Any = array(6, 1, 8, 4, 128, dtype="float32")
    table: Any = array(1, num_pages, dtype="int32")
    geometry = CacheGeometry(
        num_layers=28,
        page_size=16,
        num_kv_heads=8,
        stored_head_dim=128,
        dtype="bfloat16",
        sliding_window=window,
    )
    assert few_rows.fits_attention(qkv, table, 128, geometry) == fits


def test_nothing_is_fused_over_several_devices_nor_by_xla():
    axis_types = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=axis_types)
    assert ON_GPU.fuses_few_rows
    assert not model_kernels("mosaic", "gpu", mesh).fuses_few_rows
    assert not BY_XLA.fuses_few_rows


def test_what_is_not_fused_is_the_one_and_then_the_other():
    rng = np.random.default_rng(0)
    x, delta, gains, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((3, D), (3, D), (2, D), (3, D, *OUT))
    )
    residual, product = norm_product(BY_XLA, with_delta_gains=True)(x, delta, gains, weights)
    gains_slice = LayerSlice.of_layer(gains, 1)
    want, normed = BY_XLA.add_norm(x, delta, gains_slice, gains_slice, eps=1e-6, gain_offset=1.0)
    np.testing.assert_array_equal(residual, want)
    np.testing.assert_allclose(product, jnp.einsum("td,d...->t...", normed, weights[2]), rtol=1e-4)
