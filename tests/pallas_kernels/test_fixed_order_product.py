"""Fixed-order products: a row has the same bits in any company; lowered for CUDA; (gpu) run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused.fused_inputs import total
from pallas_kernels.products.fixed_order_product import (
    fits_fixed_order_product,
    fixed_order_product,
)
from pallas_kernels.products.fixed_order_schedule import make_fixed_order_schedule

INTERPRET = plgpu.InterpretGPUParams()
# K, N, transposed: the weights of Llama-3-8B and Qwen3-0.6B
REAL = [
    (4096, 6144, False),
    (4096, 4096, False),
    (4096, 28672, False),
    (14336, 4096, False),
    (4096, 128256, True),
    (1024, 4096, False),
    (2048, 1024, False),
    (3072, 1024, False),
    (1024, 151936, True),
]


def make_inputs(rows, depth, columns, transposed, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    shape = (3, columns, depth) if transposed else (3, depth, columns)
    return x, jnp.asarray(rng.standard_normal(shape), dtype), jnp.array([1], jnp.int32)


def schedule_of(rows, depth, columns, *, splits, warpgroups, group_columns=64):
    """A schedule of three or fewer programs' worth of work, in the wanted form."""
    tile = warpgroups * group_columns
    return dataclasses.replace(
        make_fixed_order_schedule(rows, depth, columns),
        splits_chunks=splits,
        warpgroups=warpgroups,
        group_columns=group_columns,
        column_tiles=-(-columns // tile),
        stages=3,
    )


def run(x, weights, layer, transposed, schedule, out_dtype=None):
    out = fixed_order_product(
        x,
        weights,
        layer,
        transposed=transposed,
        out_dtype=out_dtype,
        schedule=schedule,
        interpret=INTERPRET,
    )
    return np.asarray(total(out, 2, x.dtype if out_dtype is None else out_dtype), np.float32)


# K, N, transposed, dtype, (splits, warpgroups, group_columns) of few rows and of many
COMPANY = [
    (512, 192, False, "bfloat16", (True, 1, 64), (False, 3, 64)),
    (576, 192, True, "float16", (True, 2, 64), (False, 2, 64)),
    (128, 320, True, "bfloat16", (False, 1, 64), (False, 2, 128)),
]


@pytest.mark.parametrize(("depth", "columns", "transposed", "dtype", "few", "many"), COMPANY)
def test_a_row_has_the_same_bits_alone_and_among_others(
    depth, columns, transposed, dtype, few, many
):
    x, weights, layer = make_inputs(140, depth, columns, transposed, dtype)
    chunks = make_fixed_order_schedule(8, depth, columns).chunks
    assert (chunks > 1) == few[0]  # what is split has several planes to add up

    def bits(first, end, form):
        splits, warpgroups, group_columns = form
        padded = -(-(end - first) // 8) * 8
        schedule = schedule_of(
            padded, depth, columns,
            splits=splits, warpgroups=warpgroups, group_columns=group_columns,
        )  # fmt: skip
        return run(x[first:end], weights, layer, transposed, schedule)

    everyone = bits(0, 140, many)
    weight = np.asarray(weights[1], np.float32)
    want = np.asarray(x, np.float32) @ (weight.T if transposed else weight)
    np.testing.assert_allclose(everyone, want, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(bits(131, 132, few), everyone[131:132])
    np.testing.assert_array_equal(bits(60, 130, few), everyone[60:130])


def test_float32_results_are_equal_before_they_are_rounded():
    x, weights, layer = make_inputs(136, 512, 64, False)
    few = schedule_of(8, 512, 64, splits=True, warpgroups=1)
    many = schedule_of(136, 512, 64, splits=False, warpgroups=1)
    alone = run(x[77:78], weights, layer, False, few, jnp.float32)
    everyone = run(x, weights, layer, False, many, jnp.float32)
    np.testing.assert_array_equal(alone, everyone[77:78])
    assert (everyone != np.asarray(jnp.asarray(everyone, jnp.bfloat16), np.float32)).any()


def lower(rows, depth, columns, transposed, out_dtype=None):
    shape = (2, columns, depth) if transposed else (2, depth, columns)
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [((rows, depth), "bfloat16"), (shape, "bfloat16"), ((1,), "int32")]
    ]
    run = jax.jit(
        lambda *args: fixed_order_product(*args, transposed=transposed, out_dtype=out_dtype)
    )
    traced = run.trace(*args)
    return traced.out_info, traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 64, 256, 8192])
@pytest.mark.parametrize(("depth", "columns", "transposed"), REAL)
def test_real_shapes_lower_for_cuda(depth, columns, transposed, rows):
    out, text = lower(rows, depth, columns, transposed, jnp.float32 if transposed else None)
    assert "mosaic_gpu" in text
    assert out.shape[-2:] == (rows, columns)
    is_whole = out.ndim == 2
    assert out.dtype == (jnp.bfloat16 if is_whole and not transposed else jnp.float32)
    assert is_whole or rows < 8192


@pytest.mark.parametrize(
    ("x", "weights", "options", "message"),
    [
        (((8, 96), "bfloat16"), ((1, 96, 64), "bfloat16"), {}, "multiples of 64; got 96 and 64"),
        (((8, 64), "bfloat16"), ((1, 64, 80), "bfloat16"), {}, "multiples of 64; got 64 and 80"),
        (((8, 64), "float32"), ((1, 64, 64), "float32"), {}, "or float16; got float32"),
        (((8, 64), "bfloat16"), ((1, 64, 64), "float16"), {}, "one dtype, and the result it or"),
        (((8, 64), "bfloat16"), ((1, 128, 64), "bfloat16"), {}, r"weights \[L, K, N\]; got \(8"),
        (
            ((8, 64), "bfloat16"),
            ((1, 64, 64), "bfloat16"),
            {"out_dtype": jnp.float16},
            "got bfloat16, bfloat16 and float16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(x, weights, options, message):
    with pytest.raises(ValueError, match=message):
        fixed_order_product(jnp.zeros(*x), jnp.zeros(*weights), jnp.zeros(1, jnp.int32), **options)


def test_what_fits_can_be_asked():
    assert fits_fixed_order_product(1024, 4096, jnp.bfloat16)
    assert not fits_fixed_order_product(1024, 4096, jnp.float32)
    assert not fits_fixed_order_product(1000, 4096, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns", "transposed"), [*REAL[:4], *REAL[5:8]])
def test_on_a_gpu_rows_have_the_same_bits_in_any_company(depth, columns, transposed):
    x, weights, layer = make_inputs(4096, depth, columns, transposed)

    def bits(first, end):
        out = fixed_order_product(x[first:end], weights, layer, transposed=transposed)
        return np.asarray(total(out, 2, x.dtype), np.float32)

    everyone = bits(0, 4096)
    weight = weights[1].T if transposed else weights[1]
    want = jnp.dot(x, weight, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(everyone, np.asarray(want), rtol=1e-2, atol=1e-1)
    for first, end in [(0, 1), (1000, 1007), (130, 194), (77, 205), (300, 812), (4000, 4096)]:
        np.testing.assert_array_equal(bits(first, end), everyone[first:end])
