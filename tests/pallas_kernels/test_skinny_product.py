"""Products of few rows: interpreted, lowered for CUDA, and (mark gpu) run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.products.product_tuning import ProductTuningConfig
from pallas_kernels.products.skinny_product import fits_skinny_product, skinny_product

# K, N, transposed: the weights of Llama-3-8B and Qwen3-0.6B
REAL = [
    (4096, 6144, False),
    (4096, 4096, False),
    (4096, 28672, False),
    (14336, 4096, False),
    (4096, 128256, True),
    (1024, 4096, False),
    (2048, 1024, False),
    (1024, 6144, False),
    (3072, 1024, False),
    (1024, 151936, True),
]


def tuned(num_processors, **sizes):
    return ProductTuningConfig(
        num_processors=num_processors, enough_programs=num_processors, min_share_kib=8, **sizes
    )


UNEVEN = tuned(5, block_n=64)
TWO_GROUPS = tuned(2, block_n=256)
SMALL_RING = tuned(2, block_n=128, ring_kib=80)
ONE_PLANE = tuned(2, block_n=128, max_partials=1)
# rows, K, N, transposed, dtype, tuning, planes
INTERPRETED = [
    (8, 256, 192, False, "bfloat16", UNEVEN, 2),
    (16, 320, 192, True, "bfloat16", UNEVEN, 3),  # some tiles have but two planes with sums
    (64, 384, 256, False, "bfloat16", TWO_GROUPS, 2),
    (11, 448, 256, True, "float16", SMALL_RING, 1),
    (1, 256, 192, False, "bfloat16", UNEVEN, 2),  # few rows of x stay in shared memory
    (3, 384, 192, True, "float16", UNEVEN, 2),
    (5, 1024, 128, False, "bfloat16", tuned(11, block_n=64), 6),  # shares go on at the start of K
    (7, 384, 256, False, "bfloat16", TWO_GROUPS, 2),
    (3, 192, 128, False, "bfloat16", SMALL_RING, 2),  # K that no warpgroup shares evenly
    (16, 128, 320, False, "bfloat16", ONE_PLANE, 1),  # the last tile overlaps its neighbour
]


def make_inputs(rows, depth, columns, transposed, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    shape = (3, columns, depth) if transposed else (3, depth, columns)
    return x, jnp.asarray(rng.standard_normal(shape), dtype), jnp.array([1], jnp.int32)


def assert_is_product(got, x, weights, transposed):
    weight = np.asarray(weights[1], np.float32)
    want = np.asarray(x, np.float32) @ (weight.T if transposed else weight)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got).sum(0), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "transposed", "dtype", "tuning", "planes"), INTERPRETED
)
def test_interpreted_planes_sum_to_the_product_of_the_asked_layer(
    rows, depth, columns, transposed, dtype, tuning, planes
):
    x, weights, layer = make_inputs(rows, depth, columns, transposed, dtype)
    got = skinny_product(
        x,
        weights,
        layer,
        transposed=transposed,
        tuning=tuning,
        interpret=plgpu.InterpretGPUParams(),
    )
    assert got.shape == (planes, rows, columns)
    assert_is_product(got, x, weights, transposed)


def lower(rows, depth, columns, transposed):
    shape = (2, columns, depth) if transposed else (2, depth, columns)
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [((rows, depth), "bfloat16"), (shape, "bfloat16"), ((1,), "int32")]
    ]
    run = jax.jit(lambda *args: skinny_product(*args, transposed=transposed))
    return run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("depth", "columns", "transposed"), REAL)
def test_real_shapes_lower_for_cuda(depth, columns, transposed, rows):
    text = lower(rows, depth, columns, transposed)
    assert "mosaic_gpu" in text
    if transposed:
        assert f"tensor<1x{rows}x{columns}xf32>" in text


def test_most_rows_lower_for_cuda():
    assert "mosaic_gpu" in lower(128, 4096, 28672, False)


@pytest.mark.parametrize(
    ("x_shape", "weights_shape", "dtype", "message"),
    [
        ((129, 64), (1, 64, 64), "bfloat16", "from 1 to 128; got 129"),
        ((8, 96), (1, 96, 64), "bfloat16", "multiples of 64; got 96 and 64"),
        ((8, 64), (1, 64, 80), "bfloat16", "multiples of 64; got 64 and 80"),
        ((8, 64), (1, 64, 64), "float32", "bfloat16 or float16; got float32"),
        ((8, 64), (1, 128, 64), "bfloat16", r"with x's K 64; got \(1, 128, 64\)"),
        ((8, 64), (64, 64), "bfloat16", r"weights \[L, K, N\]; got"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(x_shape, weights_shape, dtype, message):
    assert not fits_skinny_product(x_shape, weights_shape, dtype, False)
    with pytest.raises(ValueError, match=message):
        skinny_product(jnp.zeros(x_shape, dtype), jnp.zeros(weights_shape, dtype), jnp.zeros(1))


def test_two_dtypes_are_refused():
    x, weights = jnp.zeros((8, 64), "bfloat16"), jnp.zeros((1, 64, 64), "float16")
    with pytest.raises(ValueError, match="one dtype; got bfloat16 and float16"):
        skinny_product(x, weights, jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize(("depth", "columns", "transposed"), REAL)
def test_real_shapes_fit(depth, columns, transposed):
    weights = (1, columns, depth) if transposed else (28, depth, columns)
    assert fits_skinny_product((8, depth), weights, jnp.bfloat16, transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 8, 33, 64, 128])
@pytest.mark.parametrize(("depth", "columns", "transposed"), [*REAL[1:4], *REAL[6:8]])
def test_kernel_on_a_gpu_is_the_product(depth, columns, transposed, rows):
    x, weights, layer = make_inputs(rows, depth, columns, transposed)
    got = skinny_product(x, weights, layer, transposed=transposed)
    weight = weights[1].T if transposed else weights[1]
    want = jnp.dot(x, weight, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(np.asarray(got.sum(0)), np.asarray(want), rtol=0, atol=2e-2)
