"""The product with gate and up that gates: against jnp in interpret mode; for CUDA; (gpu) run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.xla_fused import ACTIVATIONS
from pallas_kernels.products.gated_product import (
    default_tuning,
    fits_gated_product,
    gated_product,
    runs_at_once,
)
from pallas_kernels.products.gated_product_kernel import GatedProductTuning

INTERPRET = plgpu.InterpretGPUParams()
LAYER = jnp.array([1], jnp.int32)
REAL = [(4096, 14336), (1024, 3072)]  # D and F of Llama-3-8B and of Qwen3-0.6B
# The tiles that are chosen by default: 64 rows x 64 columns, 128 x 64, 128 x 128.
SMALL, NARROW, WIDE = TILES = [
    {"column_tile": 64, "warpgroups": 1},
    {"column_tile": 64, "warpgroups": 2},
    {"column_tile": 128, "warpgroups": 2},
]


def make_inputs(rows, depth, width, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    weights = rng.standard_normal((3, depth, 2 * width)) * depth**-0.5
    return x, jnp.asarray(weights, dtype)


def expected(x, weights, activation):
    """In float32."""
    weight = weights[1].astype(jnp.float32)
    sums = jnp.dot(x.astype(jnp.float32), weight, precision="highest")
    gate, up = jnp.split(sums, 2, axis=1)
    return np.asarray(ACTIVATIONS[activation](gate) * up)


# T, D, F, dtype, activation, tuning: the ends of rows and columns overlap, or fit, or are padded;
# a program has one tile or several; the ring is shorter and longer than a tile.
CASES = [
    (128, 64, 128, "bfloat16", "silu", {}),
    (264, 192, 192, "float16", "gelu_tanh", {"stages": 2, "programs": 3, "row_group": 2}),
    (131, 320, 256, "bfloat16", "silu", {"stages": 3, "programs": 1}),
    (136, 128, 320, "float16", "silu", {"programs": 2, "row_group": 1}),
    (1, 128, 128, "bfloat16", "silu", {}),
    (64, 192, 192, "bfloat16", "silu", {"stages": 2, "programs": 1}),
    (75, 128, 256, "float16", "gelu_tanh", {"programs": 1}),
    (72, 192, 192, "float16", "silu", {"warpgroups": 1, "programs": 1}),
    (75, 640, 192, "bfloat16", "gelu_tanh", {**SMALL, "programs": 2}),
    (200, 192, 128, "bfloat16", "silu", {**SMALL, "stages": 2, "programs": 3, "row_group": 2}),
    (256, 64, 128, "float16", "gelu_tanh", {**NARROW, "stages": 2}),
    (136, 448, 192, "bfloat16", "silu", {**NARROW, "programs": 2, "row_group": 1}),
]


@pytest.mark.parametrize(("rows", "depth", "width", "dtype", "activation", "changes"), CASES)
def test_it_is_the_gated_activation_of_the_product(
    rows, depth, width, dtype, activation, changes
):  # fmt: skip
    x, weights = make_inputs(rows, depth, width, dtype)
    tuning = GatedProductTuning(**changes)
    got = gated_product(
        x, weights, LAYER, activation=activation, interpret=INTERPRET, tuning=tuning
    )
    assert got.shape == (rows, width)
    assert got.dtype == x.dtype
    tolerance = float(jnp.finfo(dtype).eps)  # one rounding, and float32 sums
    want = expected(x, weights, activation)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance)


def lower(rows, depth, width, dtype="bfloat16", **options):
    shapes = [((rows, depth), dtype), ((2, depth, 2 * width), dtype), ((1,), "int32")]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    traced = jax.jit(lambda *args: gated_product(*args, **options)).trace(*args)
    return traced.out_info, traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [8, 64, 104, 256, 1000, 8192])
@pytest.mark.parametrize(("depth", "width"), REAL)
def test_real_shapes_lower_for_cuda_and_copy_nothing(depth, width, rows):
    out, text = lower(rows, depth, width, activation="silu")
    assert (out.shape, out.dtype) == ((rows, width), jnp.bfloat16)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text
    assert "stablehlo.slice" not in text


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_lowers_for_cuda(tile):
    tuning = GatedProductTuning(**tile)
    out, text = lower(200, 1024, 3072, activation="silu", tuning=tuning)
    assert (out.shape, out.dtype) == ((200, 3072), jnp.bfloat16)
    assert text.count("custom_call @mosaic_gpu") == 1


def test_the_other_types_lower_for_cuda():
    tuning = GatedProductTuning(stages=3)
    out, text = lower(1001, 1024, 192, "float16", activation="gelu_tanh", tuning=tuning)
    assert (out.shape, out.dtype) == ((1001, 192), jnp.float16)
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("x", "weights", "activation", "message"),
    [
        (((128, 64), "float32"), ((1, 64, 256), "float32"), "silu", "or float16; got float32"),
        (((128, 64), "bfloat16"), ((1, 64, 256), "float16"), "silu", "one dtype; got bfloat16"),
        (((128, 64), "bfloat16"), ((1, 128, 256), "bfloat16"), "silu", r"\[L, D, 2 \* F\]; got"),
        (((0, 64), "bfloat16"), ((1, 64, 256), "bfloat16"), "silu", "at least 1 row; got 0"),
        (((128, 96), "bfloat16"), ((1, 96, 256), "bfloat16"), "silu", "got 96 and 128"),
        (((128, 64), "bfloat16"), ((1, 64, 128), "bfloat16"), "silu", "got 64 and 64"),
        (((128, 64), "bfloat16"), ((1, 64, 320), "bfloat16"), "silu", "got 64 and 160"),
        (((128, 64), "bfloat16"), ((1, 64, 256), "bfloat16"), "relu", "gelu_tanh; got 'relu'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(x, weights, activation, message):
    x, weights = jnp.zeros(*x), jnp.zeros(*weights)
    with pytest.raises(ValueError, match=message):
        gated_product(x, weights, LAYER, activation=activation)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"stages": 1}, "stages must be at least 2; got 1"),
        ({"column_tile": 32}, "column_tile must be 64 or 128; got 32"),
        ({"warpgroups": 3}, "warpgroups must be 1 or 2; got 3"),
        ({"row_group": 0}, r"at least 1; got \(0, 132\)"),
        ({"programs": 0}, r"at least 1; got \(8, 0\)"),
    ],
)
def test_a_tuning_that_would_not_run_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        GatedProductTuning(**sizes)


@pytest.mark.parametrize(
    ("tile", "stages"), [(WIDE, 4), ({"warpgroups": 1}, 5), (SMALL, 8), (NARROW, 6)]
)
def test_the_ring_takes_the_stages_that_shared_memory_holds(tile, stages):
    tuning = GatedProductTuning(**tile)
    assert tuning.ring_stages == stages
    assert GatedProductTuning(**tile, stages=3).ring_stages == 3
    stage = (tuning.row_tile + 2 * tuning.column_tile) * 64 * 2
    staged = tuning.row_tile * tuning.column_tile * 2
    free = 227 * 1024 - staged - stages * stage
    assert 2048 <= free
    assert stages == 8 or free - stage < 3072


@pytest.mark.parametrize(
    ("rows", "width", "tile"),
    [
        (8, 3072, SMALL),
        (128, 3072, SMALL),  # 96 tiles
        (136, 3072, NARROW),  # small ones would be 144
        (256, 3072, NARROW),  # 96
        (257, 3072, WIDE),  # narrow ones would be 144
        (8, 8448, SMALL),  # 132
        (72, 8448, NARROW),  # 132; small ones would be 264
        (8, 8512, WIDE),  # small ones would be 133
        (8, 14336, WIDE),
    ],
)
def test_the_smallest_tiles_serve_of_which_all_run_at_the_same_time(rows, width, tile):
    assert default_tuning(rows, width) == GatedProductTuning(**tile)
    assert runs_at_once(rows, width) == (tile is not WIDE)


@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (128, WIDE),  # 1 round; 2 of narrow ones
        (256, WIDE),  # 2; 4
        (512, NARROW),  # 4, of which the last has 52 tiles for 132 processors; 7
        (640, NARROW),  # 5; 9
        (1024, WIDE),  # 7; 14
        (8192, WIDE),  # 55; 109
    ],
)
def test_where_more_rounds_are_needed_their_time_decides(rows, tile):
    assert default_tuning(rows, 14336) == GatedProductTuning(**tile)
    assert not runs_at_once(rows, 14336)


def test_what_fits_can_be_asked():
    assert fits_gated_product((1000, 1024), (28, 1024, 6144), jnp.bfloat16)
    assert not fits_gated_product((1000, 1024), (28, 1024, 6144), jnp.float32)
    assert fits_gated_product((1, 1024), (28, 1024, 6144), jnp.bfloat16)
    assert not fits_gated_product((1000, 1024), (28, 1024, 6143), jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "depth", "width", "tile"),
    [
        *((rows, *sizes, None) for sizes in REAL for rows in (8, 64, 256, 1000, 1024, 8192)),
        (1001, 1024, 1344, None),  # padded rows; the last tiles of rows and columns overlap
        (1024, 1024, 3136, None),  # 200 tiles of 132 programs; the last ones of columns overlap
        *((200, 1024, 3072, tile) for tile in TILES),
    ],
)
def test_on_a_gpu_it_is_the_gated_activation_of_the_product(rows, depth, width, tile):
    x, weights = make_inputs(rows, depth, width)
    tuning = None if tile is None else GatedProductTuning(**tile)
    got = gated_product(x, weights, LAYER, activation="silu", tuning=tuning)
    want = expected(x, weights, "silu")
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=2e-2)
